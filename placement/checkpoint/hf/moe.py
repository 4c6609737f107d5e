"""The MoE settings of a model from ``config.json``: one function for each format in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from placement.checkpoint.directory.header_fields import NOT_GIVEN, HeaderFields, made
from placement.checkpoint.hf.safetensors_file import read_directory
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelError

_NAMES = {
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "groups": "n_group",
    "top_groups": "topk_group",
    "routed_scaling": "routed_scaling_factor",
}
"""Fields of `MoESpec` that have another name in config.json."""


def read_moe(config: HeaderFields, how: str | None, num_layers: int) -> MoESpec | None:
    """Returns the MoE settings of a model; None if no layer has experts.

    `config` has the fields of config.json. `how` is the family's config format (`Family.moe`, for example ``mixtral``); None: a
    dense family. The headers of the weights beside the file, if any, are read to see how experts are stored. Raises
    `ModelError` if a field is missing or not valid, or if an option is not supported.
    """
    if how is None:
        return None
    values = _READ[how](config, num_layers)
    if not values["layers"]:
        return None
    if values.get("form", "each") in ("each", "mixtral") and is_fused(config.file.parent):
        values["form"] = "fused"
    return made(MoESpec, config.file, _NAMES, **values)


def is_fused(folder: Path) -> bool:
    """Whether the checkpoint in `folder` has all experts of a layer in one tensor. The config does not say so, the tensor names
    do.

    False if there are no readable weights: a folder without weights serves for planning only, and a damaged one is refused when
    it is loaded.
    """
    try:
        return any(name.endswith(".mlp.experts.gate_up_proj") for name in read_directory(folder).tensors)
    except ModelError:
        return False


def _mixtral(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    return {
        "num_experts": config.whole("num_local_experts", 8),
        "top_k": config.whole("num_experts_per_tok", 2),
        "expert_size": config.whole("intermediate_size"),
        "layers": tuple(range(num_layers)),
        "normalise": True,
        "form": "mixtral",
    }


def _qwen(config: HeaderFields, num_layers: int, experts: int, top_k: int, size: int) -> dict[str, Any]:
    """Returns the MoE settings of a Qwen model: every ``decoder_sparse_step``-th layer has experts, except
    ``mlp_only_layers``."""
    step = config.whole("decoder_sparse_step", 1)
    if step < 1:
        raise config.fault("decoder_sparse_step", "must be at least 1")
    dense = config.wholes("mlp_only_layers") or []
    # 0 experts mean a dense model. transformers itself writes num_local_experts in some files.
    found = config.whole("num_experts", config.whole("num_local_experts", experts))
    return {
        "num_experts": found,
        "top_k": config.whole("num_experts_per_tok", top_k),
        "expert_size": config.whole("moe_intermediate_size", size),
        "layers": tuple(layer for layer in range(step - 1, num_layers, step) if found and layer not in dense),
        "normalise": config.flag("norm_topk_prob", False),
    }


def _qwen2(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    shared = config.whole("shared_expert_intermediate_size", 5632)
    return {**_qwen(config, num_layers, 60, 4, 1408), "shared_size": shared, "shared_gate": True}


def _qwen3(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    return _qwen(config, num_layers, 128, 8, 768)


def _gpt_oss(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    return {
        "num_experts": config.whole("num_local_experts", config.whole("num_experts", 128)),
        "top_k": config.whole("num_experts_per_tok", config.whole("experts_per_token", 4)),
        "expert_size": config.whole("intermediate_size"),
        "layers": tuple(range(num_layers)),
        "normalise": True,
        "router_bias": True,
        "expert_bias": True,
        "swiglu_limit": config.number("swiglu_limit", 7.0),
        "swiglu_alpha": config.number("swiglu_alpha", 1.702),
        "form": "gpt_oss",
    }


def _deepseek(config: HeaderFields, num_layers: int, **defaults: Any) -> dict[str, Any]:
    """Returns the MoE settings of a DeepSeek model: dense layers first, expert groups, and the shared experts as one expert of
    their joint size."""
    size = config.whole("moe_intermediate_size", defaults["size"])
    return {
        "num_experts": config.whole("n_routed_experts", config.whole("num_local_experts", defaults["experts"])),
        "top_k": config.whole("num_experts_per_tok", defaults["top_k"]),
        "expert_size": size,
        "layers": tuple(range(config.whole("first_k_dense_replace", defaults["dense"]), num_layers)),
        "groups": config.whole("n_group", defaults["groups"]) or 1,
        "top_groups": config.whole("topk_group", defaults["top_groups"]) or 1,
        "routed_scaling": config.number("routed_scaling_factor", defaults["scaling"]),
        "shared_size": size * config.whole("n_shared_experts", defaults["shared"]),
    }


def _deepseek_v2(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    """Returns the MoE settings of DeepSeek-V2. Routing is limited to the best groups only if ``topk_method`` says so.
    ``norm_topk_prob`` has two published meanings, so that only false is accepted."""
    defaults = {"size": 1407, "experts": 64, "top_k": NOT_GIVEN, "dense": 0, "groups": 1, "top_groups": 1}
    values = _deepseek(config, num_layers, **defaults, scaling=1.0, shared=2)
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.fault("topk_method", "must be greedy or group_limited_greedy")
    if config.flag("norm_topk_prob", False):
        raise config.fault("norm_topk_prob", "only false is supported for deepseek_v2")
    return values if method == "group_limited_greedy" else {**values, "groups": 1, "top_groups": 1}


def _chosen_by_sigmoid(values: dict[str, Any], config: HeaderFields) -> dict[str, Any]:
    """Returns `values` with DeepSeek-V3's changes to routing, which other families took over."""
    own = {"scoring": "sigmoid", "choice_bias": True, "group_score": "best_two"}
    return {**values, **own, "normalise": config.flag("norm_topk_prob", True)}


def _deepseek_v3(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    defaults = {"size": 2048, "experts": 256, "top_k": 8, "dense": 3, "groups": 8, "top_groups": 4}
    return _chosen_by_sigmoid(_deepseek(config, num_layers, **defaults, scaling=2.5, shared=1), config)


def _glm4(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    defaults = {"size": 1408, "experts": 128, "top_k": 8, "dense": 1, "groups": 1, "top_groups": 1}
    return _chosen_by_sigmoid(_deepseek(config, num_layers, **defaults, scaling=1.0, shared=1), config)


def _mimo(config: HeaderFields, num_layers: int) -> dict[str, Any]:
    """Returns the MoE settings of MiMo-V2. The layers with experts are in ``mlp_layer_types`` (dense, sparse) or
    ``moe_layer_freq`` (0, 1); without either, all layers but the first."""
    for name, sole in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.text(name, sole) != sole:
            raise config.fault(name, f"only {sole} is supported for mimo_v2_flash")
    kinds, flags = config.texts("mlp_layer_types"), config.wholes("moe_layer_freq")
    if kinds is None:
        kinds = ["sparse" if own else "dense" for own in flags or [0, *[1] * (num_layers - 1)]]
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        name = "moe_layer_freq" if "mlp_layer_types" not in config.values else "mlp_layer_types"
        raise config.fault(name, f"must say dense or sparse of each of the {num_layers} layers")
    defaults = {"size": 2048, "experts": 256, "top_k": 8, "dense": 0, "groups": 1, "top_groups": 1}
    values = _deepseek(config, num_layers, **defaults, scaling=1.0, shared=0)
    return _chosen_by_sigmoid({**values, "layers": tuple(at for at, kind in enumerate(kinds) if kind == "sparse")}, config)


_READ: dict[str, Callable[[HeaderFields, int], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4": _glm4,
    "mimo": _mimo,
}
"""Readers of the MoE formats, by `Family.moe`."""
