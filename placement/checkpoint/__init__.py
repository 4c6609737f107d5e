"""Checkpoint readers: the model's settings and tensor directory from the headers of any supported format. No weight is read."""
