"""Collectives among ranks: the Group interface, and the groups of one rank and of threads."""
