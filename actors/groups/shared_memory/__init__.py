"""Collectives among processes of one host, over shared memory."""
