"""The requests in an engine: the waiting queue, tenant fairness, sequences, and token events."""
