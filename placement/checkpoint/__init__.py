"""Reads what a model is from a checkpoint's headers, whatever its format. No weight is touched."""
