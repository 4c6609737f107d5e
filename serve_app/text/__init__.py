"""Text at the edge: tokenizer, chat template, detokenising and stop strings. Nothing below `serve_app` sees a string."""
