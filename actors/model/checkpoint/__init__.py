"""Checkpoints on disk, and how one rank's slices of them reach its parameters."""
