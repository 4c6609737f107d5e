"""The parallel layout, the rank grid, and how rows of things are partitioned over ranks."""
