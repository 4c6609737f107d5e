"""The block manager: KV blocks, who holds them, and prefix hashes by which they are found again."""
