"""The real model against transformers: logits in fp32 and bf16, and the greedy text of twenty real prompts.

A greedy token may differ from transformers' only where the two best logits are closer than ten times the largest
difference seen between the two implementations (design: where the margin allows).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.engine.config.engine_config import EngineConfig
from actors.model.kv.kv_cache import KVCache
from actors.model.step.batch import Batch
from actors.wire.requests import GenerateRequest, SamplingParams
from serve_app.text.model_files import read_text_files
from tests.support.inprocess import in_process, whole_decoder
from tests.support.models.smollm2 import QUESTIONS, smollm2, smollm2_file
from tests.support.models.tiny_models import TinyModel

pytestmark = pytest.mark.long
CONFIG = EngineConfig(num_blocks=400, max_model_len=256, max_sequences=20)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    files = read_text_files(smollm2_file())
    assert files.tokenizer is not None
    assert files.template is not None
    texts = [files.template.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [files.tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logits(model: TinyModel, tokens: list[int], dtype: torch.dtype) -> Tensor:
    """[tokens, vocabulary] fp32 of one rank, in one step."""
    spec, decoder, blocks = model.spec, whole_decoder(model, dtype), list(range(-(-len(tokens) // 16)))
    cache = KVCache(range(spec.num_layers), spec.num_kv_heads, len(blocks), 16, spec.head_dim, dtype)
    rows = torch.arange(len(tokens))
    return decoder.logits(decoder(Batch(torch.tensor(tokens), rows, rows, [len(tokens)], [0], [blocks], rows), None, cache))


def test_logits_in_fp32(prompts: list[list[int]]) -> None:
    model = smollm2()
    found = logits(model, prompts[0], torch.float32)
    torch.testing.assert_close(found, model.logits(prompts[0]), atol=2e-4, rtol=0)


def test_logits_in_bf16(prompts: list[list[int]]) -> None:
    """Our bf16 error against fp32 is at most twice that of transformers' own bf16, plus 1e-2."""
    model = smollm2()
    exact = model.logits(prompts[0])
    theirs = model.reference.to(torch.bfloat16)
    try:
        with torch.inference_mode():
            theirs_error = (theirs(torch.tensor([prompts[0]])).logits[0].float() - exact).abs().mean()
    finally:
        model.reference.to(torch.float32)
        smollm2.cache_clear()
    ours = logits(model, prompts[0], torch.bfloat16)
    assert (ours - exact).abs().mean() <= 2 * theirs_error + 1e-2


SPLIT = ["tp=5", "pp=3", "cp=3,tp=2", "tp=6,dcp=2", "tp=2,pp=2,cp=2", "tp=3,sp=true"]


@pytest.mark.parametrize("layout", SPLIT)
def test_greedy_text_under_a_layout(prompts: list[list[int]], layout: str) -> None:
    check_greedy_text(prompts[:3], layout, 12)


@pytest.mark.parametrize("layout", ["", "tp=3"])
def test_greedy_text_of_twenty_prompts(prompts: list[list[int]], layout: str) -> None:
    check_greedy_text(prompts, layout, NEW_TOKENS)


def check_greedy_text(prompts: list[list[int]], layout: str, new_tokens: int) -> None:
    """Teacher-forced: each token is the reference's best wherever its margin is clear, and its logprob is the reference's."""
    model = smollm2()
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt=prompt,
            max_tokens=new_tokens,
            sampling=SamplingParams(temperature=0, logprobs=0, stop_token_ids=model.spec.eos_token_ids),
        )
        for number, prompt in enumerate(prompts)
    ]
    with in_process(model, layout, CONFIG) as replica:
        waiting = [replica.submit(request) for request in requests]
        answers = [replica.finish(events) for events in waiting]
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs = torch.log_softmax(model.logits(prompt + answer.tokens)[len(prompt) - 1 : -1], -1)
        chosen = logprobs[range(len(answer.tokens)), answer.tokens]
        error = (chosen - torch.tensor([entry.logprob for entry in answer.logprobs])).abs().max()
        assert error < 1e-3
        top = logprobs.topk(2, -1)
        clear = top.values[:, 0] - top.values[:, 1] > 10 * error
        assert torch.equal(top.indices[clear, 0], torch.tensor(answer.tokens)[clear])
        compared += int(clear.sum())
    assert compared > 0.9 * sum(len(answer.tokens) for answer in answers)
