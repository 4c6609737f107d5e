"""Mixture of experts (MoE): the router, token dispatch (the expert all-to-all), the experts, combine."""
