"""What a Ray cluster has: nodes, slots, labels, and measured links."""
