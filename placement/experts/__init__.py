"""Expert-parallel load balancing (EPLB): the map of logical experts to physical slots, its balance, and moves between maps."""
