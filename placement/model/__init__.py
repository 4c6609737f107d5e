"""What a model is: its sizes, attention kinds and experts, as one frozen value."""
