"""GGUF files: their header, tensor names and RoPE scaling."""
