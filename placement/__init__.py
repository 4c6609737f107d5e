"""Layout planning: decides which rank owns which weights, KV heads and experts, and estimates what that costs.

The package is pure Python over frozen values; it imports neither torch nor Ray::

    checkpoint.header -> ModelSpec ─┐
    Layout.parse      -> Layout ────┼─> legality.check ─> mesh (the rank grid) ─> shards (who owns what) ─> cost, nodes
    nodes.hardware    -> ClusterSpec┘
"""
