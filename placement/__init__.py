"""Decides what goes where, and what it costs: pure values, without torch and without Ray.

checkpoint.header -> ModelSpec ─┐
Layout.parse      -> Layout ────┼─> legality.check ─> mesh (the rank grid) ─> shards (who owns what) ─> cost, nodes
nodes.hardware    -> ClusterSpec┘
"""
