"""Small checkpoints with random weights, loading of one rank, and the way back from all ranks to the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.model.checkpoint.load import load
from actors.model.checkpoint.open_source import open_source
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters, shard

Weights = dict[str, Tensor]

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "intermediate_size": 160,
    "vocab_size": 101,
}
"""6 query heads in 3 KV groups, a vocabulary that no layout divides, and widths of whole quantisation blocks."""

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
}

LAYOUTS = [Layout(tp=tp, pp=pp) for tp in (1, 2, 3, 5) for pp in (1, 2)]


def random_model(family: str) -> PreTrainedModel:
    """A tiny model in which no two numbers are alike: not even norms and biases keep their initial ones and zeros."""
    torch.manual_seed(0)
    model: PreTrainedModel = FAMILIES[family]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def stored(model: PreTrainedModel, spec: ModelSpec) -> Weights:
    """The tensors a checkpoint of this model holds."""
    return {name: x for name, x in model.state_dict().items() if not (spec.tie_embeddings and name == "lm_head.weight")}


def llama_spec(**changes: object) -> ModelSpec:
    """The spec of ``FAMILIES["llama"]``, with some fields changed."""
    fields: dict[str, object] = {
        "family": "llama",
        "hidden_size": 96,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 32,
        "intermediate_size": 160,
        "vocab_size": 101,
        "max_position": 2048,
        "norm_eps": 1e-6,
        "dtype": "float32",
    } | changes
    return ModelSpec.model_validate({"windows": (None,) * int(str(fields["num_layers"]))} | fields)


def empty_parameters(spec: ModelSpec, own: Shard, dtype: torch.dtype = torch.float32) -> Weights:
    """The parameters of one rank before loading: NaN, so that what is not filled shows."""
    return {p.name: torch.full(p.shape, torch.nan, dtype=dtype) for p in parameters(spec, own)}


def load_rank(path: Path, spec: ModelSpec, layout: Layout, world_rank: int, dtype: torch.dtype = torch.float32) -> Weights:
    """What one rank holds after loading its shard of the checkpoint at `path`."""
    own = shard(spec, layout, coords_of(layout, world_rank))
    weights = empty_parameters(spec, own, dtype)
    source = open_source(path, spec)
    load(weights, spec, own, source)
    source.close()
    return weights


def load_all(path: Path, spec: ModelSpec, layout: Layout, dtype: torch.dtype = torch.float32) -> Weights:
    """The whole model, put together from every rank of a layout. Fails where two ranks disagree or padding is not zero."""
    whole: Weights = {}
    for world_rank in range(layout.world):
        own = shard(spec, layout, coords_of(layout, world_rank))
        for name, shape, dim, take, part in _slices(spec, own, load_rank(path, spec, layout, world_rank, dtype)):
            held = whole.setdefault(name, torch.full(shape, torch.nan, dtype=dtype)).narrow(dim, take.start, len(take))
            assert torch.all(held.isnan() | (held == part)), f"ranks disagree on {name}"
            held.copy_(part)
    return whole


Slice = tuple[str, tuple[int, ...], int, range, Tensor]
"""Hugging Face name, whole shape, dim of the slice, its place along that dim, the slice."""


def _slices(spec: ModelSpec, own: Shard, weights: Weights) -> Iterator[Slice]:
    """A rank's parameters, taken apart by the ranges of its shard alone: a second opinion on the table of slices."""
    for name, x in weights.items():
        tail = tuple(x.shape[1:])
        match name.split("."):
            case ["embed" | "head" as end, _]:
                there = "lm_head" if end == "head" and not spec.tie_embeddings else "model.embed_tokens"
                take = range(min(own.vocab.start, spec.vocab_size), min(own.vocab.stop, spec.vocab_size))
                assert torch.all(x[len(take) :] == 0), "padding rows are not zero"
                yield f"{there}.weight", (spec.vocab_size, *tail), 0, take, x[: len(take)]
            case ["norm", _]:
                yield "model.norm.weight", tuple(x.shape), 0, range(len(x)), x
            case ["layers", layer, *rest]:
                yield from _layer_slices(spec, own, f"model.layers.{layer}", rest, x)


def _layer_slices(spec: ModelSpec, own: Shard, there: str, rest: list[str], x: Tensor) -> Iterator[Slice]:
    tail = tuple(x.shape[1:])
    heads = {"q": (own.q_heads, spec.num_heads), "k": (own.kv_heads, spec.num_kv_heads), "v": (own.kv_heads, spec.num_kv_heads)}
    match rest:
        case ["attn", "qkv", leaf]:
            dim = spec.head_dim
            for (letter, (mine, all_of_them)), part in zip(
                heads.items(), x.split([len(mine) * dim for mine, _ in heads.values()]), strict=True
            ):
                rows = range(mine.start * dim, mine.stop * dim)
                yield f"{there}.self_attn.{letter}_proj.{leaf}", (all_of_them * dim, *tail), 0, rows, part
        case ["mlp", "gate_up", leaf]:
            for half, part in zip(("gate", "up"), x.chunk(2), strict=True):
                yield f"{there}.mlp.{half}_proj.{leaf}", (spec.intermediate_size, *tail), 0, own.columns, part
        case ["attn", "o", "weight"]:
            inputs = range(own.q_heads.start * spec.head_dim, own.q_heads.stop * spec.head_dim)
            yield f"{there}.self_attn.o_proj.weight", (len(x), spec.num_heads * spec.head_dim), 1, inputs, x
        case ["mlp", "down", "weight"]:
            yield f"{there}.mlp.down_proj.weight", (len(x), spec.intermediate_size), 1, own.columns, x
        case _:
            name = ".".join(rest)
            for ours, theirs in {
                "input_norm": "input_layernorm",
                "post_norm": "post_attention_layernorm",
                "attn.o.": "self_attn.o_proj.",
                "mlp.down.": "mlp.down_proj.",
                "attn.q_norm": "self_attn.q_norm",
                "attn.k_norm": "self_attn.k_norm",
            }.items():
                if name.startswith(ours):
                    yield f"{there}.{name.replace(ours, theirs)}", tuple(x.shape), 0, range(len(x)), x
