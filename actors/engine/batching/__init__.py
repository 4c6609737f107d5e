"""How the sequences of a DP rank become step plans: token budgets and pipeline micro-batches."""
