"""The model specification: sizes, attention kinds and experts of a model, as one frozen value."""
