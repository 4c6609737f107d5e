"""Expert-parallel load balancing (EPLB): the expert map, its balance, and moves between maps."""
