"""How a rank turns its slice of the logits into tokens and log-probabilities, together with its tp peers."""
