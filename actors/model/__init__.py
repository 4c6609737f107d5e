"""One pipeline stage of one rank: the decoder, built from the model's spec and the rank's shard."""
