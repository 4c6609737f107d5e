"""Layouts as text and drawings: the grid, one layer, traffic, memory, balance."""
