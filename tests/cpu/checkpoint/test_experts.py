"""Experts on disk: fused or one by one, whole or damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from placement.checkpoint import header
from placement.layout.layout import Layout
from placement.model.spec import ModelError
from tests.support.models.checkpoint_checks import load_rank
from tests.support.models.tiny_models import TinyModel, tiny

LAYOUTS = [Layout(), Layout(tp=3), Layout(tp=2, pp=2)]
Weights = dict[str, Tensor]


def saved_as(model: TinyModel, folder: Path, weights: Weights) -> Path:
    """A folder with the model's config and these weights."""
    folder.mkdir(exist_ok=True)
    shutil.copy(model.folder / "config.json", folder)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_checkpoint_with_fused_experts_gives_the_same_parameters(family: str, tmp_path: Path) -> None:
    """As transformers holds them: gate over up, all experts of a layer in one tensor."""
    model = tiny(family)
    saved_as(model, tmp_path, model.reference.state_dict())
    spec = header.read(tmp_path)
    assert (spec.moe.form, model.spec.moe.form) == ("fused", "mixtral" if family == "mixtral" else "each")
    for layout in LAYOUTS:
        for rank in range(layout.world):
            one, other = load_rank(model.folder, model.spec, layout, rank), load_rank(tmp_path, spec, layout, rank)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_without_weights_is_one_to_plan_with(tmp_path: Path) -> None:
    shutil.copy(tiny("qwen3_moe").folder / "config.json", tmp_path)
    assert header.read(tmp_path) == tiny("qwen3_moe").spec


EXPERT = {
    "mixtral": "model.layers.2.block_sparse_moe.experts.3.w2.weight",
    "qwen3_moe": "model.layers.3.mlp.experts.4.up_proj.weight",
}


def lost(weights: Weights, name: str) -> None:
    del weights[name]


def transposed(weights: Weights, name: str) -> None:
    weights[name] = weights[name].T


def one_more(weights: Weights, name: str) -> None:
    weights[name.replace("experts.3", "experts.4").replace("experts.4.up", "experts.5.up")] = weights[name].clone()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lost, "1 tensors of .* are missing: "),
        (transposed, "tensor .* has shape"),
        (one_more, "1 tensors that a .* has no place for"),
    ],
)
@pytest.mark.parametrize("family", EXPERT)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_a_damaged_expert_is_named(
    family: str, layout: Layout, damage: Callable[[Weights, str], None], words: str, tmp_path: Path
) -> None:
    model, weights = tiny(family), load_file(tiny(family).folder / "model.safetensors")
    damage(weights, EXPERT[family])
    saved_as(model, tmp_path, weights)
    with pytest.raises(ModelError, match=words) as caught:
        load_rank(tmp_path, model.spec, layout, layout.world - 1)
    assert (EXPERT[family] in str(caught.value)) or damage is one_more


def test_layers_that_guess_further_tokens_are_left_unread(tmp_path: Path) -> None:
    model, weights = tiny("qwen3_moe"), load_file(tiny("qwen3_moe").folder / "model.safetensors")
    weights["model.layers.4.eh_proj.weight"] = torch.zeros(2, 2)
    saved_as(model, tmp_path, weights)
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj"):
        load_rank(tmp_path, model.spec, Layout(), 0)
    load_rank(tmp_path, model.spec.model_copy(update={"mtp_layers": 1}), Layout(), 0)
