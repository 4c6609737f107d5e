"""Layouts: which rank owns which weights, KV heads and experts under a given layout, and what that costs.

The package is pure Python over frozen values; it imports neither torch nor Ray::

    checkpoint.header -> ModelSpec ─┐
    Layout.parse      -> Layout ────┼─> legality.check ─> mesh (the rank grid) ─> shards (who owns what) ─> cost, nodes
    nodes.hardware    -> ClusterSpec┘

The layout planner, which will search for the cheapest legal layout, is not built yet. It belongs in its own folder,
``placement/planner/``, after `legality` and `cost` in the import order, since it calls both.
"""
