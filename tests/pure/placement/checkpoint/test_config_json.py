"""Models read from hand-written config.json files. The defaults are those of transformers 5.24."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.checkpoint.header import read
from placement.model.spec import ModelError, ModelSpec, RopeSpec

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 101,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, drop: tuple[str, ...] = (), **changes: object) -> Path:
    config = {name: value for name, value in {**TINY, **changes}.items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read(path)
    return str(refused.value)


def test_llama_where_the_file_is_silent(folder: Path) -> None:
    assert read(write(folder)) == ModelSpec(
        family="llama",
        hidden_size=64,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        intermediate_size=96,
        vocab_size=101,
        max_position=2048,
        norm_eps=1e-6,
        windows=(None,) * 4,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_every_family_has_its_own_defaults(folder: Path) -> None:
    specs = {name: read(write(folder, model_type=name, num_attention_heads=32)) for name in ("mistral", "qwen2", "qwen3")}
    mistral, qwen2, qwen3 = specs.values()
    assert (mistral.num_kv_heads, mistral.max_position, mistral.windows) == (8, 131072, (4096,) * 4)
    assert (qwen2.num_kv_heads, qwen2.qkv_bias, qwen2.o_bias, qwen2.windows) == (32, True, False, (None,) * 4)
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.max_position) == (128, "head", False, 32768)
    assert (qwen3.bos_token_id, qwen3.eos_token_ids) == (None, ())


def test_what_the_file_says_counts(folder: Path) -> None:
    spec = read(
        write(
            folder,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            bos_token_id=None,
            eos_token_id=[5, 6],
            sliding_window=None,
        )
    )
    assert (spec.num_kv_heads, spec.head_dim, spec.max_position, spec.norm_eps) == (2, 16, 512, 1e-5)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.tie_embeddings) == (True, True, True, True)
    assert (spec.dtype, spec.bos_token_id, spec.eos_token_ids) == ("bfloat16", None, (5, 6))


def test_the_new_spelling_of_dtype(folder: Path) -> None:
    assert read(write(folder, dtype="float16")).dtype == "float16"


def test_end_tokens_of_the_generation_config_are_added(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert read(write(folder, eos_token_id=2)).eos_token_ids == (2, 7, 9)
    # The architecture's own end token is for files that name none: it may be any other token of this vocabulary.
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read(write(folder)).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    assert read(write(folder)).eos_token_ids == (2,)
    assert read(write(folder, eos_token_id=None)).eos_token_ids == ()


def test_start_and_end_tokens_outside_of_a_nested_config(folder: Path) -> None:
    def tokens(outer: dict[str, object], inner: dict[str, object]) -> tuple[int | None, tuple[int, ...]]:
        write(folder, drop=tuple(TINY), model_type="any", text_config={**TINY, **inner}, **outer)
        spec = read(folder)
        return spec.bos_token_id, spec.eos_token_ids

    assert tokens({"bos_token_id": 8, "eos_token_id": [5, 6]}, {"bos_token_id": 3, "eos_token_id": [4, 5]}) == (3, (4, 5, 6))
    assert tokens({"bos_token_id": 8, "eos_token_id": 6}, {}) == (8, (6,))
    assert tokens({"bos_token_id": 8, "eos_token_id": 6}, {"bos_token_id": None, "eos_token_id": None}) == (8, (6,))
    assert tokens({}, {}) == (1, (2,))
    assert tokens({"eos_token_id": None}, {"bos_token_id": None}) == (None, ())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_with_a_byte_order_mark(folder: Path, encoding: str) -> None:
    expected = read(write(folder))
    (folder / "generation_config.json").write_text('{\n"eos_token_id": 7}', encoding=encoding, newline="\r\n")
    (folder / "config.json").write_text((folder / "config.json").read_text(), encoding=encoding)
    assert read(folder) == expected.model_copy(update={"eos_token_ids": (7,)})


@pytest.mark.parametrize("content", [b"\xff{}", b"\xff\xfe{", b"[" * 100_000, b"\xef\xbb\xbf"])
def test_files_that_are_no_text_are_named(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert str(folder / "config.json") in refusal(folder)


def test_a_nested_text_config(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({"model_type": "some_vl", "text_config": TINY, "tie_word_embeddings": True, "dtype": "bfloat16"})
    )
    spec = read(folder)
    assert (spec.family, spec.tie_embeddings, spec.dtype) == ("llama", True, "bfloat16")


def test_a_nested_text_config_of_few_fields(folder: Path) -> None:
    """As published for Gemma 3: the rest is that of the class, the model type that of the outer one."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    spec = read(folder)
    assert (spec.family, spec.dtype, spec.tie_embeddings) == ("gemma3_text", "bfloat16", True)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))


def test_a_nested_text_config_of_an_unknown_outer_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": {"hidden_size": 64}}))
    assert "the field model_type is missing" in refusal(folder)


def test_what_the_newer_families_are(folder: Path) -> None:
    names = ("gemma2", "gemma3_text", "phi3", "glm", "glm4", "olmo2", "smollm3")
    specs = {name: read(write(folder, model_type=name, num_attention_heads=8, num_key_value_heads=4)) for name in names}
    gemma2, gemma3, phi3, glm, glm4, olmo2, smollm3 = specs.values()
    assert (gemma2.norms, gemma2.norm_offset, gemma2.embedding_scale, gemma2.activation) == ("sandwich", 1.0, 8.0, "gelu_tanh")
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.scores_scale) == (50.0, 30.0, 1 / 16)
    assert (gemma2.windows, gemma2.local_rope, gemma2.tie_embeddings) == ((4096, None, 4096, None), None, True)
    assert (gemma3.attention_softcap, gemma3.logit_softcap, gemma3.qk_norm) == (None, None, "head")
    assert [gemma3.rope_of(layer) for layer in (0, 3)] == [RopeSpec(), RopeSpec()]
    assert (gemma3.rope, gemma3.local_rope) == (RopeSpec(theta=1e6), RopeSpec(theta=1e4))
    assert (phi3.fused_qkv, phi3.fused_gate_up, phi3.qkv_bias, phi3.windows) == (True, True, False, (None,) * 4)
    assert (glm.fused_qkv, glm.fused_gate_up, glm.qkv_bias, glm.o_bias, glm.norms) == (False, True, True, False, "pre")
    assert (glm4.norms, glm4.rope) == ("sandwich_glm", RopeSpec(rotary_dims=64, interleaved=True))
    assert (olmo2.norms, olmo2.qk_norm, olmo2.norm_eps) == ("post", "width", 1e-5)
    assert (smollm3.unrotated_layers, smollm3.rope.theta) == ((3,), 2e6)
    assert [smollm3.rope_of(layer) is None for layer in range(4)] == [False, False, False, True]


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("stated", "scaling", "limit"),
    [
        (64, YARN, 256),  # as the cards of Qwen2.5 have it
        (80, YARN, 256),  # as those of Qwen3: a little more than the trained length
        (256, YARN, 256),
        (1000, YARN, 1000),
        (64, {"rope_type": "yarn", "factor": 2.5}, 160),  # the trained length is the stated one
        (256, {**YARN, "factor": None}, 256),
        (256, {**LLAMA3, "original_max_position_embeddings": 64}, 256),
        (256, {**LONGROPE, "original_max_position_embeddings": 64}, 256),
        (64, {"rope_type": "linear", "factor": 4.0}, 64),
        (64, {"rope_type": "default"}, 64),
    ],
)
def test_the_context_length_follows_from_the_scaling(
    folder: Path, spelling: str, stated: int, scaling: dict[str, object], limit: int
) -> None:
    spec = read(write(folder, max_position_embeddings=stated, **{spelling: scaling}))
    assert spec.max_position == limit


def test_phi3_files_that_say_yarn_mean_longrope(folder: Path) -> None:
    yarn = {**LONGROPE, "type": "yarn", "rope_type": None}
    values = {"original_max_position_embeddings": 64, "max_position_embeddings": 80, "rope_scaling": yarn}
    spec = read(write(folder, model_type="phi3", num_key_value_heads=8, **values))
    assert (spec.rope.kind, spec.max_position) == ("longrope", 80)


def test_a_dynamic_rope_makes_room(folder: Path) -> None:
    spec = read(write(folder, rope_scaling={"type": "dynamic", "factor": 2.5}, max_position_embeddings=100))
    assert (spec.max_position, spec.rope.original_max_position) == (250, 100)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, ["query_pre_attn_scalar is 0"]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, ["sliding_window_pattern is 0"]),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, ["hidden_activation is 'relu'", "silu"]),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, ["no_rope_layers names 2 layers", "num_hidden_layers is 4"]),
        ({"model_type": "glm4", "partial_rotary_factor": 0.3, "head_dim": 10}, ["rotary_dims=3 is odd"]),
    ],
)
def test_bad_fields_of_the_newer_families(folder: Path, changes: dict[str, object], parts: list[str]) -> None:
    text = refusal(write(folder, **{"num_key_value_heads": 4, **changes}))
    assert all(part in text for part in ["config.json", *parts])


# Windows


def test_mistral_without_a_window(folder: Path) -> None:
    assert read(write(folder, model_type="mistral", sliding_window=None)).windows == (None,) * 4


def test_llama_has_no_windows(folder: Path) -> None:
    assert read(write(folder, sliding_window=16)).windows == (None,) * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_slides_only_where_told_to(folder: Path, family: str) -> None:
    window = {"model_type": family, "num_key_value_heads": 4, "sliding_window": 16, "max_window_layers": 3}
    assert read(write(folder, **window)).windows == (None,) * 4
    assert read(write(folder, **window, use_sliding_window=True)).windows == (None, None, None, 16)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(write(folder, **window, use_sliding_window=True, layer_types=kinds)).windows == (16, None, 16, None)


@pytest.mark.parametrize(
    ("kinds", "parts"),
    [
        (["full_attention"] * 3, ["layer_types", "3 layers", "num_hidden_layers is 4"]),
        (["linear_attention"] * 4, ["layer_types", "linear_attention"]),
        (["sliding_attention"] * 4, ["sliding_window is not set"]),
        ("full", ["layer_types", "a list of texts"]),
    ],
)
def test_bad_layer_types(folder: Path, kinds: object, parts: list[str]) -> None:
    text = refusal(write(folder, model_type="qwen2", num_key_value_heads=4, layer_types=kinds))
    assert all(part in text for part in parts)


# Rope


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_the_old_rope_keys(folder: Path, spelling: str) -> None:
    scaling = {spelling: "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    rope = read(write(folder, rope_theta=500000, rope_scaling={**scaling, "original_max_position_embeddings": 8192})).rope
    assert rope == RopeSpec(kind="llama3", theta=5e5, factor=8, original_max_position=8192)


def test_the_new_rope_keys(folder: Path) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16, "mscale": 0.7, "truncate": False}
    rope = read(write(folder, rope_theta=123, rope_scaling=None, rope_parameters=parameters)).rope
    assert rope == RopeSpec(
        kind="yarn", theta=1e6, factor=4, original_max_position=2048, beta_fast=16, mscale=0.7, truncate=False
    )


def test_a_yarn_factor_of_null_is_the_ratio_of_the_context_lengths(folder: Path) -> None:
    scaling = {"type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    assert read(write(folder, rope_scaling=scaling)).rope.factor == 4.0


def test_linear_and_default_rope(folder: Path) -> None:
    assert read(write(folder, rope_scaling={"type": "linear", "factor": 2})).rope == RopeSpec(kind="linear", factor=2)
    assert read(write(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})).rope == RopeSpec(theta=5e5)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rope_scaling": {"type": "mrope"}}, ["rope_type 'mrope'", "llama3", "longrope"]),
        ({"rope_scaling": {"type": "longrope"}}, ["short_factor is missing"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [1]}},
            ["short_factor has 2 numbers", "4 pairs"],
        ),
        ({"rope_scaling": {"type": "linear"}}, ["factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ["factor is -1.0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling is 'linear'", "an object"]),
        ({"rope_theta": 0}, ["rope_theta is 0.0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ],
)
def test_bad_rope(folder: Path, changes: dict[str, object], parts: list[str]) -> None:
    text = refusal(write(folder, **changes))
    assert all(part in text for part in ["config.json", *parts])


# Refusals


def test_a_missing_model_type_is_named(folder: Path) -> None:
    text = refusal(write(folder, drop=("model_type",)))
    assert str(folder / "config.json") in text
    assert "the field model_type is missing" in text


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_size_of_null_is_no_absent_field(folder: Path, name: str) -> None:
    """An absent size has a default; null stands for no size."""
    text = refusal(write(folder, **{name: None}))
    assert str(folder / "config.json") in text
    assert f"the field {name} is missing" in text


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "gpt2"}, ["model_type is 'gpt2'", "llama, mistral, qwen2, qwen3"]),
        ({"num_key_value_heads": 3}, ["num_heads=8", "num_kv_heads=3", "num_key_value_heads"]),
        ({"num_attention_heads": 7}, ["num_attention_heads is 7", "hidden_size=64"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0"]),
        ({"num_attention_heads": 0, "head_dim": 8}, ["num_attention_heads is 0"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers is -1"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers is 1000000000000", "10000"]),
        ({"vocab_size": -5}, ["vocab_size is -5"]),
        ({"hidden_size": "big"}, ["hidden_size is 'big'", "whole number"]),
        ({"head_dim": 7}, ["head_dim=7"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0.0"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
        ({"attention_bias": "no"}, ["attention_bias is 'no'", "true or false"]),
        ({"torch_dtype": "int8"}, ["torch_dtype is 'int8'", "float32"]),
        ({"eos_token_id": "x"}, ["eos_token_id is 'x'"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config (awq)", "not supported yet"]),
    ],
)
def test_a_bad_value_is_refused_with_file_and_field(folder: Path, changes: dict[str, object], parts: list[str]) -> None:
    text = refusal(write(folder, **changes))
    assert all(part in text for part in [str(folder / "config.json"), *parts])


def test_what_is_not_a_model_is_refused(folder: Path) -> None:
    assert f"no model at {folder / 'nowhere'}" in refusal(folder / "nowhere")
    assert "has no config.json" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "must hold a JSON object" in refusal(folder)
    (folder / "notes.txt").write_text("hello")
    assert "neither a folder nor a GGUF file" in refusal(folder / "notes.txt")
