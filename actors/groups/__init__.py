"""Collectives among ranks: the `Group` interface, and the groups of a single rank and of threads."""
