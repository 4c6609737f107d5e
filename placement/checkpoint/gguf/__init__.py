"""GGUF files: their header, tensor names and rope scaling."""
