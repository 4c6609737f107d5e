"""Layouts as text and drawings: the rank grid, one layer, traffic, memory and balance."""
