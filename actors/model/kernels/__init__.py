"""Matrix products on each device, and what they were tuned to."""
