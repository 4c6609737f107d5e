"""The paged KV cache of one rank."""
