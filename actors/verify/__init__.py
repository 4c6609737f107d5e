"""Proves a layout: runs it beside one rank, and tells rounding from a fault."""
