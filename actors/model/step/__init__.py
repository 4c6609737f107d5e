"""State that the layers of one step share: the batch, rotary embeddings, sequence-parallel regions."""
