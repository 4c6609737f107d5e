"""Sampling, from logits to tokens: each rank has a slice of the vocabulary, and all ranks choose the same token."""
