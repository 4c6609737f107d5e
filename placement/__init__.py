"""Layout planning: decides which rank owns which weights, KV heads and experts, and estimates what that costs.

The package is pure Python over frozen values; it imports neither torch nor Ray::

    checkpoint.header -> ModelSpec ─┐
    Layout.parse      -> Layout ────┼─> legality.check ─> mesh (the rank grid) ─> shards (who owns what) ─> cost, nodes
    nodes.hardware    -> ClusterSpec┘

The planner, which will search for the cheapest legal layout, belongs into a folder of its own, ``placement/planner/``, after
`legality` and `cost` in the order of imports, since it calls both.
"""
