"""The map of logical experts to physical slots (EPLB), its balance, and moves from one map to another."""
