"""Attention on CPU with torch's flash-attention operator."""
