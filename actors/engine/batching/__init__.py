"""Composition of step plans: token budgets, chunked prefill and pipeline micro-batches."""
