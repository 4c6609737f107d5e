"""What goes where, and what it costs: values and decisions, all pure. Never torch, never ray.

checkpoint_header -> ModelSpec ─┐
Layout.parse      -> Layout ────┼─> Layout.check ─> mesh (who sits where) ─> shards (who owns what) ─> memory, bundles
hardware          -> ClusterSpec┘
"""
