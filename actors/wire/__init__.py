"""The messages that cross process boundaries: requests, step plans, step results, KV and expert reports, rank settings."""
