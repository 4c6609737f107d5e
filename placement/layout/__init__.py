"""The parallel layout, the rank grid (device mesh), and partitions of layers, heads and columns over ranks."""
