"""Mixture of experts: who does a token's feed-forward part, and how the parts are added up."""
