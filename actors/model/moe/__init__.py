"""Mixture of experts (MoE): the router, dispatch of tokens to expert ranks, the experts, combine."""
