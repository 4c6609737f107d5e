"""Sliding-window layers and layers without RoPE (NoPE), from ``config.json``."""

from __future__ import annotations

from collections.abc import Callable

from placement.checkpoint.directory.header_fields import HeaderFields
from placement.checkpoint.hf.families import Family
from placement.model.spec import ModelError

Windows = tuple[int | None, ...]


def read_windows(config: HeaderFields, family: Family, num_layers: int) -> Windows:
    """Returns the sliding window of each layer in tokens, ``[num_layers]``; None for full attention. `config` has the fields of
    config.json, `family` the defaults of its architecture. Raises `ModelError` if a field has the wrong type, if the layer
    types are unknown or do not match `num_layers`, or if a window layer has no window size."""
    window = config.whole("sliding_window", None if "sliding_window" in config.values else family.window)
    return _RULES[family.windows](config, family, window, num_layers)


def read_unrotated(config: HeaderFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Returns the indices of the layers without RoPE. `config` has the fields of config.json, `family` the defaults of its
    architecture. The field ``no_rope_layers`` means the reverse of its name: 1 marks a layer with RoPE. Raises `ModelError` if
    it has fewer than `num_layers` entries, or if a field has the wrong type."""
    if family.no_rope_interval is None:
        return ()
    flags = config.wholes("no_rope_layers")
    if flags is None:
        interval = config.whole("no_rope_layer_interval", family.no_rope_interval)
        return tuple(range(interval - 1, num_layers, interval)) if interval > 0 else ()
    if len(flags) < num_layers:
        raise ModelError(f"{config.file}: no_rope_layers names {len(flags)} layers, but num_hidden_layers is {num_layers}")
    return tuple(layer for layer in range(num_layers) if not flags[layer])


def _none(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    return (None,) * num_layers


def _all(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    return (window,) * num_layers


def _qwen(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    """Windows on the layers from ``max_window_layers`` on, only with ``use_sliding_window``."""
    if not config.flag("use_sliding_window", False):
        window = None
    kinds = config.texts("layer_types")
    if kinds is None:
        first = config.whole("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _of_kinds(config, kinds, window, num_layers)


def _qwen2_moe(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    """Windows on every other layer, from the first one, before ``max_window_layers``; only with ``use_sliding_window``."""
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.texts("layer_types")
    if kinds is not None:
        return _of_kinds(config, kinds, window, num_layers)
    last = config.whole("max_window_layers", 28)
    return tuple(window if layer % 2 == 0 and layer < last else None for layer in range(num_layers))


def _if_told(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    """Windows on all layers, only with ``use_sliding_window``."""
    return (window if config.flag("use_sliding_window", False) else None,) * num_layers


def _alternating(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    """Windows on every other layer, from the first one."""
    kinds = config.texts("layer_types") or [("sliding_attention", "full_attention")[at % 2] for at in range(num_layers)]
    return _of_kinds(config, kinds, window, num_layers)


def _smollm3(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    """Windows on the layers without RoPE, only with ``use_sliding_window``."""
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.texts("layer_types")
    if kinds is None:
        unrotated = read_unrotated(config, family, num_layers)
        return tuple(window if layer in unrotated else None for layer in range(num_layers))
    return _of_kinds(config, kinds, window, num_layers)


def _pattern(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    """Windows on all layers but every n-th."""
    kinds = config.texts("layer_types")
    if kinds is not None and window is not None:
        return _of_kinds(config, kinds, window, num_layers)
    every = config.whole("sliding_window_pattern", family.window_pattern)
    if every < 1:
        raise config.fault("sliding_window_pattern", "must be at least 1")
    return tuple(window if layer % every else None for layer in range(1, num_layers + 1))


def _hybrid(config: HeaderFields, family: Family, window: int | None, num_layers: int) -> Windows:
    """Windows on the layers marked 1 in ``hybrid_layer_pattern``; without it, on all layers but the first and every sixth.

    ``sliding_window_size`` counts the tokens before a query, ``sliding_window`` the query as well. If both are given, the first
    is used.
    """
    size = config.whole("sliding_window_size", None)
    pattern, kinds = config.wholes("hybrid_layer_pattern"), config.texts("layer_types")
    if pattern is None:
        pattern = [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(num_layers)]
    if kinds is None:
        kinds = [("full_attention", "sliding_attention")[bool(own)] for own in pattern]
    return _of_kinds(config, kinds, window if size is None else size + 1, num_layers)


def _of_kinds(config: HeaderFields, kinds: list[str], window: int | None, num_layers: int) -> Windows:
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ModelError(f"{config.file}: layer_types names {', '.join(unknown)}; known are {', '.join(known)}")
    if len(kinds) != num_layers:
        raise ModelError(f"{config.file}: layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    if window is None and "sliding_attention" in kinds:
        raise ModelError(f"{config.file}: layer_types has sliding_attention, but sliding_window is not set (or not used)")
    return tuple(known[kind] for kind in kinds)


_RULES: dict[str, Callable[[HeaderFields, Family, int | None, int], Windows]] = {
    "none": _none,
    "all": _all,
    "qwen": _qwen,
    "qwen2_moe": _qwen2_moe,
    "if_told": _if_told,
    "alternating": _alternating,
    "smollm3": _smollm3,
    "pattern": _pattern,
    "hybrid": _hybrid,
}
"""The rules for sliding windows, by `Family.windows`."""
