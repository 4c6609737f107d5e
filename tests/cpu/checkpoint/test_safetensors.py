"""Loading from Hugging Face folders: all ranks together hold the checkpoint exactly, and nothing is let through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.model.checkpoint.load import load
from actors.model.checkpoint.open_source import open_source
from placement.checkpoint.hf import config_json
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.spec import ModelError
from placement.ownership.shards import shard
from tests.support.models.checkpoint_checks import (
    FAMILIES,
    LAYOUTS,
    empty_parameters,
    llama_spec,
    load_all,
    load_rank,
    random_model,
    stored,
)

torch.set_num_threads(1)

SPEC = llama_spec()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(folder, state dict) of one family, saved in several files."""
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(request.param)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder, stored(model, config_json.read(folder))


@pytest.fixture
def llama(tmp_path):
    """(folder, state dict) of a llama saved in one file; the tensors may be changed and saved again."""
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    return tmp_path, load_file(tmp_path / "model.safetensors")


def resave(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_together_hold_the_checkpoint_exactly(family, layout):
    folder, expected = family
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole = load_all(folder, config_json.read(folder), layout)
    assert whole.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(whole[name], x), name


def test_values_are_cast_to_the_type_of_the_parameter(llama):
    folder, expected = llama
    whole = load_all(folder, SPEC, Layout(tp=2), torch.bfloat16)
    assert all(torch.equal(whole[name], x.bfloat16()) for name, x in expected.items())


def test_parameters_that_require_grad_are_filled_in_place(llama):
    folder, expected = llama
    own = shard(SPEC, Layout(), coords_of(Layout(), 0))
    weights = {name: torch.nn.Parameter(x) for name, x in empty_parameters(SPEC, own).items()}
    load(weights, SPEC, own, open_source(folder, SPEC))
    assert torch.equal(weights["norm.weight"].data, expected["model.norm.weight"])


def test_progress_counts_the_bytes_of_the_rank(llama):
    own = shard(SPEC, Layout(tp=2), coords_of(Layout(tp=2), 1))
    weights = empty_parameters(SPEC, own)
    heard = []
    load(weights, SPEC, own, open_source(llama[0], SPEC), lambda done, total: heard.append((done, total)))
    total = sum(x.nbytes for x in weights.values())
    assert heard[-1] == (total, total)
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})


def test_a_single_file_can_be_given_instead_of_its_folder(llama):
    folder, expected = llama
    whole = load_all(folder / "model.safetensors", SPEC, Layout())
    assert torch.equal(whole["lm_head.weight"], expected["lm_head.weight"])


def test_a_missing_tensor_is_named_with_its_file_and_stage(llama):
    folder, tensors = llama
    del tensors["model.layers.2.mlp.up_proj.weight"]
    resave(folder, tensors)
    layout = Layout(pp=2)
    load_rank(folder, SPEC, layout, 0)
    with pytest.raises(
        ModelError, match=r"1 tensors of layers 2-2 \(the last stage\).*missing: model.layers.2.mlp.up_proj"
    ) as e:
        load_rank(folder, SPEC, layout, 1)
    assert str(folder) in str(e.value)


def test_an_unexpected_tensor_is_refused_by_every_rank(llama):
    folder, tensors = llama
    resave(folder, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(192)})
    for world_rank in range(2):
        with pytest.raises(ModelError, match=r"1 tensors .*no place.*q_proj\.bias"):
            load_rank(folder, SPEC, Layout(pp=2), world_rank)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama):
    folder, tensors = llama
    name = "model.layers.1.self_attn.o_proj.weight"
    resave(folder, tensors | {name: tensors[name].T.contiguous()})
    with pytest.raises(ModelError, match=rf"model.safetensors: tensor {name} has shape \[192, 96\].*\[96, 192\]"):
        load_rank(folder, SPEC, Layout(tp=3), 2)


def test_a_refusal_comes_before_any_parameter_is_touched(llama):
    folder, tensors = llama
    resave(folder, tensors | {"lm_head.weight": torch.zeros(100, 96)})
    own = shard(SPEC, Layout(), coords_of(Layout(), 0))
    weights = empty_parameters(SPEC, own)
    with pytest.raises(ModelError):
        load(weights, SPEC, own, open_source(folder, SPEC))
    assert all(x.isnan().all() for x in weights.values())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_type_that_cannot_be_read_is_named(llama, dtype):
    folder, tensors = llama
    resave(folder, tensors | {"model.norm.weight": torch.ones(96).to(dtype)})
    with pytest.raises(ModelError, match=r"model.safetensors: tensor model.norm.weight has type (I8|F8_E4M3)"):
        load_rank(folder, SPEC, Layout(), 0)


def test_auxiliary_tensors_are_ignored(llama):
    folder, tensors = llama
    resave(folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    whole = load_all(folder, SPEC, Layout())
    assert whole.keys() == tensors.keys()
    assert all(torch.equal(whole[name], x) for name, x in tensors.items())


def test_a_second_copy_of_the_head_is_ignored_only_where_it_is_tied(llama):
    folder, tensors = llama
    tied = SPEC.model_copy(update={"tie_embeddings": True})
    whole = load_all(folder, tied, Layout(pp=2))
    assert "lm_head.weight" not in whole
    resave(folder, {name: x for name, x in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ModelError, match=r"missing: lm_head.weight"):
        load_rank(folder, SPEC, Layout(), 0)


@pytest.mark.parametrize("change", ["rename", "reshape", "meta"])
def test_a_decoder_that_differs_from_the_table_is_refused(llama, change):
    own = shard(SPEC, Layout(), coords_of(Layout(), 0))
    weights = empty_parameters(SPEC, own)
    norm = weights.pop("norm.weight")
    weights |= {
        "rename": {"final_norm.weight": norm},
        "reshape": {"norm.weight": norm[1:]},
        "meta": {"norm.weight": norm.to("meta")},
    }[change]
    with pytest.raises(ModelError, match=r"norm\.weight"):
        load(weights, SPEC, own, open_source(llama[0], SPEC))


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "1 of 1 files it names are not there: gone.safetensors"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not a file beside the index"),
        ({"weight_map": {"a": 7}}, "not a file beside the index"),
        ({"weight_map": ["a"]}, "unreadable"),
        ({"weight_map": {"a": []}}, "unreadable"),
        ({}, "unreadable"),
        ([], "unreadable"),
        ("{", "unreadable"),
    ],
)
def test_a_bad_index_is_named(tmp_path, index, complaint):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(ModelError, match=complaint) as e:
        open_source(tmp_path, SPEC)
    assert str(file) in str(e.value)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=3, pp=2)], ids=str)
@pytest.mark.parametrize("files", [("base", "changed"), ("model-2", "a-changed")])
def test_of_two_copies_of_a_tensor_the_one_that_the_index_names_is_loaded(llama, files, layout):
    """Whichever of the two files comes first by name."""
    folder, tensors = llama
    (folder / "model.safetensors").unlink()
    base, overlay = (f"{name}.safetensors" for name in files)
    names = ("model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight")
    changed = {name: tensors[name] + 1 for name in names}
    save_file(tensors, folder / base)
    save_file(changed, folder / overlay)
    index = {"weight_map": dict.fromkeys(tensors, base) | dict.fromkeys(changed, overlay)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = load_all(folder, SPEC, layout)
    assert all(torch.equal(whole[name], x) for name, x in (tensors | changed).items())


@pytest.mark.parametrize("path", ["nowhere", "nowhere.gguf", "empty", "file.txt"])
def test_what_is_not_a_checkpoint_is_named(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("hello")
    with pytest.raises(ModelError, match=path):
        open_source(tmp_path / path, SPEC)
