"""Runs a model: the engine that schedules tokens, and the ranks that compute them."""
