"""Mixture of experts: the router, dispatch of tokens to expert ranks, the experts, combine."""
