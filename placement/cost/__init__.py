"""Cost estimates of a layout before it runs: memory per rank, and the bytes that every collective sends."""
