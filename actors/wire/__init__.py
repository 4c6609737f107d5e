"""The messages that cross process boundaries: requests, step plans, results, KV and expert reports, settings."""
