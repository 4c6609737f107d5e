"""Folders whose config ties the LM head to the embedding, whatever their files hold: log-probabilities as in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from placement.checkpoint import header
from placement.checkpoint.header import check_tensors
from placement.layout.layout import Layout
from placement.model.spec import ModelError
from tests.support.long_cases import long
from tests.support.models.tiny_decoder import whole
from tests.support.models.tiny_models import TinyModel, tiny
from tests.support.plan_driver import driver

torch.set_num_threads(1)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28]]


def held(case: str, embedding: Tensor) -> dict[str, Tensor]:
    """What the file of a tied model holds of embedding and head."""
    unlike = embedding.clone()
    unlike[-1, -1] += 0.5
    return {
        "embedding": {EMBEDDING: embedding},
        "head": {HEAD: embedding},
        "equal": {EMBEDDING: embedding, HEAD: embedding.clone()},
        "equal values of another type": {EMBEDDING: embedding, HEAD: embedding.double()},
        "unlike in the last value": {EMBEDDING: embedding, HEAD: unlike},
        "unlike": {EMBEDDING: embedding, HEAD: torch.randn(embedding.shape, generator=torch.Generator().manual_seed(7))},
        "neither": {},
        "head of another shape": {EMBEDDING: embedding, HEAD: embedding[:-1].clone()},
        "head of a type that cannot be read": {EMBEDDING: embedding, HEAD: embedding.to(torch.int8)},
    }[case]


def folder_of(case: str, family: str, tied: bool | None, folder: Path) -> Path:
    """A copy of a tied model's folder that holds what `held` says. `tied`: the field of config.json; None removes it."""
    model = tiny(family, tied=True)
    shutil.copytree(model.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config if tied is None else config | {"tie_word_embeddings": tied}))
    tensors = load_file(folder / "model.safetensors")
    ends = held(case, tensors.pop(EMBEDDING))
    tensors.pop(HEAD, None)
    save_file(tensors | ends, folder / "model.safetensors", {"format": "pt"})
    return folder


CASES = [
    ("embedding", True, "tp=3"),
    ("head", False, "tp=3"),
    ("head", False, "pp=2"),
    ("equal", True, "pp=2"),
    ("equal values of another type", False, "tp=2"),
    ("unlike in the last value", False, "tp=5"),
    ("unlike", False, "tp=3"),
    ("unlike", False, "pp=2"),
]
LONG_CASES = [
    ("unlike", False, "attn_dp=2"),
    ("unlike", False, "attn_dp=2,tp=2,pp=2,lm_head=stage"),
    ("head", False, "tp=3,pp=2"),
]


@pytest.mark.parametrize(("case", "one_copy", "layout"), [*CASES, *long(*LONG_CASES)])
def test_the_head_is_what_transformers_makes_of_the_files(case: str, one_copy: bool, layout: str, tmp_path: Path) -> None:
    folder = folder_of(case, "llama3", True, tmp_path / "it")
    spec = header.read(folder)
    check_tensors(folder, spec)
    assert spec.tie_embeddings == (one_copy or case == "head")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with driver(TinyModel(folder, spec, reference), Layout.parse(layout)) as ranks:
        found = ranks.play(PROMPTS, whole(PROMPTS))
    for prompt, scored in zip(PROMPTS, found, strict=True):
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            logprobs = reference(tokens).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        assert torch.allclose(scored[:, 0], expected, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_family_that_is_tied_by_default_is_no_exception(family: str, tmp_path: Path) -> None:
    specs = {case: header.read(folder_of(case, family, None, tmp_path / case)) for case in ("embedding", "equal", "unlike")}
    assert {case: spec.tie_embeddings for case, spec in specs.items()} == {"embedding": True, "equal": True, "unlike": False}


@pytest.mark.parametrize(
    ("case", "tied", "said"),
    [
        ("neither", True, rf"1 tensors .* are missing: {EMBEDDING}"),
        ("embedding", False, rf"1 tensors .* are missing: {HEAD}"),
        ("head", False, rf"1 tensors .* are missing: {EMBEDDING}"),
        ("head of another shape", True, rf"tensor {HEAD} has shape \[100, 48\].*\[101, 48\]"),
        ("head of a type that cannot be read", True, rf"tensor {HEAD} has type I8, which cannot be read"),
    ],
)
def test_what_transformers_could_only_guess_is_refused_by_name(case: str, tied: bool, said: str, tmp_path: Path) -> None:
    folder = folder_of(case, "llama3", tied, tmp_path / "it")
    with pytest.raises(ModelError, match=said) as refused:
        check_tensors(folder, header.read(folder))
    assert str(folder) in str(refused.value)


def test_a_bare_config_is_as_tied_as_it_says(tmp_path: Path) -> None:
    folder = folder_of("unlike", "llama3", True, tmp_path / "it")
    (folder / "model.safetensors").unlink()
    assert header.read(folder).tie_embeddings
