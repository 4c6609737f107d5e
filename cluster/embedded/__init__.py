"""Joins a Ray cluster, or starts one inside the command that needs it."""
