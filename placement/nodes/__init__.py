"""Machines, the links between them, and the assignment of placement-group bundles to nodes."""
