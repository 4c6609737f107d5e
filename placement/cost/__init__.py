"""What a layout costs before it runs: memory, and the bytes that every collective sends."""
