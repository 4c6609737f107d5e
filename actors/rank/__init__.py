"""The worker process of one rank: it receives step plans, runs its part of the model, and returns step results."""
