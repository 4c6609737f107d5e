"""Requests in the engine: the waiting queue, live sequences, and their token events."""
