"""From logits to tokens: each rank has a slice of the vocabulary, and all choose the same token."""
