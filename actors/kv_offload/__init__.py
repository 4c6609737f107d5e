"""KV offload: KV blocks spilled to host memory and to disk, and fetched back."""
