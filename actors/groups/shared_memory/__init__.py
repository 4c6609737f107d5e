"""Collectives among processes of one host, over memory that they all map."""
