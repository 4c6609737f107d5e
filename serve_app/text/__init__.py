"""Text at the edge: tokenizers, chat templates, detokenising and stop strings."""
