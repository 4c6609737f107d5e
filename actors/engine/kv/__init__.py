"""The block manager: allocation and reference counts of KV blocks, and the hashes of the prefix cache."""
