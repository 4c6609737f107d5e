"""Text processing: tokenizers, chat templates, detokenizing and stop strings."""
