"""A small model as a value, for tests of what only reads one: nothing runs it."""

from __future__ import annotations

from placement.model.spec import ModelSpec

DENSE = ModelSpec(
    family="llama",
    hidden_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    intermediate_size=96,
    vocab_size=101,
    max_position=64,
    norm_eps=1e-5,
    windows=(None,) * 4,
)
