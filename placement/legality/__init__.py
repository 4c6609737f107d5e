"""The rules that a layout must keep, checked all at once, and the nearest legal layouts."""
