"""Checkpoints of every family, as a Hugging Face folder and as a GGUF file, give the parameters and the logits they should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.groups.solo import SoloGroup
from actors.model.attention.cpu.backend import CpuAttention
from actors.model.decoder import Decoder
from placement.checkpoint import header
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.spec import ModelSpec
from placement.ownership.shards import shard
from tests.support.long_cases import long
from tests.support.models.checkpoint_checks import load_rank
from tests.support.models.gguf_models import K_QUANTS, write_model
from tests.support.models.tiny_decoder import fill, mixed, run
from tests.support.models.tiny_models import FAMILIES, TinyModel, tiny

torch.set_num_threads(1)

NEWER = ("smollm3", "olmo2", "phi3", "glm4", "gemma2", "gemma3")
LAYOUTS = [Layout(), Layout(tp=3), Layout(tp=5, pp=2)]
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "vocab_size": 103,
}
"""Every matrix has rows of whole blocks of 256."""
IN_THE_HEADER_ONLY = {"family", "dtype", "quantization", "bos_token_id", "eos_token_ids", "attention_scale"}


def wide(family: str, **sizes: object) -> TinyModel:
    """A model whose head size and score scale are what GGUF files can say."""
    own: dict[str, dict[str, Any]] = {
        "gemma2": {"tied": True, "query_pre_attn_scalar": 64},
        "gemma3": {"tied": True, "query_pre_attn_scalar": 64, "sliding_window_pattern": 6, "rope_parameters": None},
        "smollm3": {"no_rope_layer_interval": 4},
        "phi3": {"rope": "longrope_24"},
    }
    return tiny(family, **{**WIDE, **own.get(family, {}), **sizes})


def of_parameters(model: TinyModel, layout: Layout, rank: int) -> dict[str, Tensor]:
    """What a rank should hold: the table's slices of the model's weights."""
    own = shard(model.spec, layout, coords_of(layout, rank))
    decoder = Decoder(model.spec, own, SoloGroup("tp"), CpuAttention(), torch.float32)
    fill(decoder, model, own)
    return dict(decoder.named_parameters())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, *long(True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_by_the_table_with_no_tensor_left(family: str, tied: bool, layout: Layout) -> None:
    model = tiny(family, tied=tied)
    for rank in range(layout.world):
        loaded = load_rank(model.folder, model.spec, layout, rank)
        for name, weight in of_parameters(model, layout, rank).items():
            assert torch.equal(loaded[name], weight), name


def reread(model: TinyModel, path: Path, kind: str) -> TinyModel:
    """The model of a GGUF file, with a transformers model of the same weights."""
    expected = write_model(path, model, kind)
    reference = type(model.reference)(model.reference.config).eval()
    reference.load_state_dict(expected, strict=False)
    return TinyModel(path, header.read(path), reference)


@pytest.mark.parametrize("family", NEWER)
def test_a_file_says_what_the_folder_says(family: str, tmp_path: Path) -> None:
    model = wide(family, num_hidden_layers=8)
    read = reread(model, tmp_path / "m.gguf", "F32").spec
    assert differences(read, model.spec) <= IN_THE_HEADER_ONLY
    assert read.scores_scale == pytest.approx(model.spec.scores_scale)


def differences(one: ModelSpec, other: ModelSpec) -> set[str]:
    """Fields that differ; numbers of a rope may differ by their rounding to float32."""
    ropes = {"rope", "local_rope"}
    for name in ropes:
        left, right = (getattr(spec, name) for spec in (one, other))
        assert (left is None) == (right is None)
        if left is not None and left.kind == "longrope":
            right = right.model_copy(update={"attention_factor": pytest.approx((1 + 3 / 5) ** 0.5)})
            for factor in ("short_factor", "long_factor"):
                assert getattr(left, factor) == pytest.approx(getattr(right, factor))
                right = right.model_copy(update={factor: getattr(left, factor)})
        assert left == right
    return {name for name in ModelSpec.model_fields if getattr(one, name) != getattr(other, name)} - ropes


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", *long("F32", *sorted({*K_QUANTS} - {"Q4_K"}))])
@pytest.mark.parametrize("family", NEWER)
def test_a_file_gives_the_logits_of_its_weights(family: str, kind: str, tmp_path: Path) -> None:
    model = reread(wide(family), tmp_path / "m.gguf", kind)
    sequences = [[7 * at % 103 for at in range(length)] for length in (3, 40)]
    for tokens, logits in zip(sequences, run(model, Layout(), sequences, mixed(sequences, 2)), strict=True):
        torch.testing.assert_close(logits, model.logits(tokens), atol=1e-4, rtol=1e-4)
    for layout in (Layout(tp=2), Layout(tp=3, pp=2)):
        for rank in range(layout.world):
            loaded = load_rank(model.folder, model.spec, layout, rank)
            for name, weight in of_parameters(model, layout, rank).items():
                torch.testing.assert_close(loaded[name], weight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("family", ["phi3", "olmo2"])
def test_a_tensor_too_many_is_still_refused(family: str, tmp_path: Path) -> None:
    model = wide(family)
    write_model(tmp_path / "m.gguf", model, "F32")
    spec = header.read(tmp_path / "m.gguf")
    other = replace(model, spec=spec.model_copy(update={"num_layers": 1, "windows": spec.windows[:1]}))
    with pytest.raises(ValueError, match=r"tensors that a .* model with these settings has no place for"):
        load_rank(tmp_path / "m.gguf", other.spec, Layout(), 0)
