"""Attention on CPU, with torch's flash operator."""
