"""Layout verification: runs a layout beside one rank, and tells whether differences are rounding or a fault."""
