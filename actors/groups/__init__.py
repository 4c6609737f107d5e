"""Collectives among ranks: the `Group` interface, and its backends (one rank, threads, torch.distributed, shared memory)."""
