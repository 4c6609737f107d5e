"""The layers of a dense transformer, on one tensor-parallel rank's slice of the weights."""
