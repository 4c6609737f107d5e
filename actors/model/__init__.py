"""The model of one rank: one pipeline stage of the decoder, built from the model's spec and the rank's shard."""
