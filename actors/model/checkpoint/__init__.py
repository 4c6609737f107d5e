"""Loads one rank's slices of a checkpoint into its parameters."""
