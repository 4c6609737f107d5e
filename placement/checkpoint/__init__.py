"""Checkpoint readers: model settings and tensors, from the headers of every format."""
