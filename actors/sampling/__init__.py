"""Sampling: each rank has a slice of the vocabulary's logits, and all ranks choose the same token."""
