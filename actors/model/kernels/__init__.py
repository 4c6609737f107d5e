"""Matrix products, tuned for each device."""
