"""KV pages on their way from the ranks of one replica to those of another."""
