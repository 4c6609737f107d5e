"""Attention on CUDA, with the flash-attention package that is present."""
