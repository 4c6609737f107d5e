"""Hugging Face folders: config.json and the headers of safetensors files."""
