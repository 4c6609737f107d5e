"""The layers of a dense transformer, on one rank's slice of the weights."""
