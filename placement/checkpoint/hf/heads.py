"""Attention heads that differ between layers, or between keys and values, from ``config.json`` (MiMo-V2).

Published files describe the sliding-window layers by ``swa_`` fields beside the usual ones. Files written by transformers omit
them; such a layer then has twice the KV heads. The number of query heads and the head sizes are the same in all layers.
"""

from __future__ import annotations

from typing import Any

from placement.checkpoint.directory.header_fields import HeaderFields
from placement.checkpoint.hf.families import Family

_SAME = ("num_attention_heads", "head_dim", "v_head_dim")
_SINKS = {(False, False): "none", (False, True): "windows", (True, True): "all"}
"""Values of `ModelSpec.sinks`, by (full-attention layers have sinks, sliding-window layers have sinks)."""


def read_heads(
    config: HeaderFields, family: Family, head_dim: int, num_kv_heads: int, windows: tuple[int | None, ...]
) -> dict[str, Any]:
    """Returns the fields of `ModelSpec` for KV heads, value size and attention sinks, as keyword arguments.

    `config` has the fields of config.json, `family` the defaults of its architecture. `head_dim` and `num_kv_heads` are those
    of the full-attention layers, `windows` the sliding window of each layer (None: full attention). Raises `ModelError` if a
    field has the wrong type, if window layers have other query heads or head sizes, or if only full-attention layers have
    sinks.
    """
    if not family.hybrid:
        return {"num_kv_heads": num_kv_heads, "sinks": family.sinks}
    for name in _SAME:
        usual, own = config.whole(name, None), config.whole(f"swa_{name}", None)
        if None not in (usual, own) and usual != own:
            raise config.fault(f"swa_{name}", f"only {name}={usual}, the same in all layers, is supported")
    value_dim = config.whole("v_head_dim", 128)
    return {
        **_kv_heads(config, num_kv_heads, windows),
        "value_dim": None if value_dim == head_dim else value_dim,
        "value_scale": config.number("attention_value_scale", 1.0 if "attention_value_scale" in config.values else 0.707),
        "sinks": _sinks(config),
        "sinks_name": "attention_sink_bias",
    }


def _kv_heads(config: HeaderFields, num_kv_heads: int, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Returns the number of KV heads of the layers without and with a window; one number if all layers are of one kind."""
    own = config.whole("swa_num_key_value_heads", 2 * num_kv_heads)
    if own == num_kv_heads or not any(windows):
        return {"num_kv_heads": num_kv_heads}
    return {"num_kv_heads": num_kv_heads, "window_kv_heads": own} if None in windows else {"num_kv_heads": own}


def _sinks(config: HeaderFields) -> str:
    full, window = (config.flag(f"add_{layers}_attention_sink_bias", layers == "swa") for layers in ("full", "swa"))
    if (full, window) not in _SINKS:
        raise config.fault("add_swa_attention_sink_bias", "sinks in none but the layers that see everything are not supported")
    return _SINKS[full, window]
