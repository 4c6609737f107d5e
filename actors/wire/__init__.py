"""What crosses a process boundary: requests, step plans, results, KV and expert messages, settings of ranks."""
