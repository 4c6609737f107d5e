"""The parallel layout, the rank grid (device mesh), and the partition of layers, heads and columns over ranks."""
