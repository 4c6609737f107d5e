"""Attention on CUDA, with an installed flash-attention package."""
