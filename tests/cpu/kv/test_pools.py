"""Prefill and decode pools with unlike layouts, in one process: what they answer is what one replica answers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from actors.engine.admission import InvalidRequest
from actors.engine.config.engine_config import EngineConfig
from actors.kv_transfer.pages import copy_slots
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from actors.wire.tier_config import TierConfig
from placement.layout.layout import Layout
from placement.legality.check import check
from placement.ownership.handoff import Copy, Side, head_bytes
from placement.ownership.handoff_pages import PageTable
from tests.cpu.engine.test_tiered_engine import answers, prompts, request, tiered
from tests.support.inprocess import in_process
from tests.support.kv.handoff_cases import kept
from tests.support.kv.pools import pools
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny
from tests.support.random_requests import random_requests

torch.set_num_threads(1)

LENGTHS = (1, 15, 16, 17, 33, 200)
LAYOUTS = (
    "",
    "tp=2",
    "pp=3",
    "tp=3",
    "cp=2",
    "tp=4",
    "pp=2",
    "attn_dp=2",
    "tp=2,tp_shares=2/1",
    "tp=4,dcp=2",
    "pp=2,stage_layers=3/1",
)
FAMILIES: dict[str, dict[str, object]] = {
    "gqa": {"family": "llama3"},
    "mla": {"family": "deepseek_v2"},
    "mha": {"family": "llama2", "num_key_value_heads": 6},
    "one head": {"family": "qwen3", "num_key_value_heads": 1},
}
PAGES = ((16, 32), (32, 16), (16, 16))
PAIRS = [(at, LAYOUTS[at % 11], LAYOUTS[(at + 1 + at // 11) % 11]) for at in range(44)]
"""Each layout on each side four times, beside four others."""


def config(block_size: int, **changes: object) -> EngineConfig:
    sizes = {"num_blocks": 1024 // block_size, "max_model_len": 256, "max_batch_tokens": 64, "max_chunk_tokens": 48}
    return EngineConfig(**{"block_size": block_size, "max_sequences": 8, **sizes, **changes})


def model_of(name: str) -> TinyModel:
    return tiny(**FAMILIES[name])


def legal(name: str, layout: str) -> bool:
    return not check(Layout.parse(layout), model_of(name).spec)


def family_for(at: int, *layouts: str) -> str:
    """A family that both layouts are legal for, another one from case to case."""
    names = list(FAMILIES)
    return next(name for name in names[at % 4 :] + names[: at % 4] if all(legal(name, layout) for layout in layouts))


def greedy(length: int, **changes: object) -> GenerateRequest:
    prompt = [(7 * length + 3 * at * at) % 101 for at in range(length)]
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    return GenerateRequest(**{"request_id": f"r{length}", "prompt": prompt, "max_tokens": 5, "sampling": sampling, **changes})


@cache
def alone(name: str) -> dict[str, TokenEvent]:
    """What one rank answers."""
    with in_process(model_of(name), "", config(16)) as replica:
        return {f"r{length}": replica.run(greedy(length)) for length in LENGTHS}


@pytest.mark.parametrize(
    ("at", "prefill", "decode"), [*PAIRS[:11], *long(*PAIRS[11:])], ids=[f"{one} to {other}" for _, one, other in PAIRS]
)
def test_tokens_equal_those_of_one_rank(at: int, prefill: str, decode: str) -> None:
    name, (page, other_page) = family_for(at, prefill, decode), PAGES[at % 3]
    spec = model_of(name).spec
    with pools(model_of(name), prefill, decode, config(page), config(other_page)) as both:
        waiting = {f"r{length}": both.submit(greedy(length)) for length in LENGTHS}
        for request_id, events in waiting.items():
            found, expected = both.decode.finish(events), alone(name)[request_id]
            assert (found.tokens, found.finish) == (expected.tokens, "length"), request_id
            for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
                assert (ours.token, ours.logprob) == (theirs.token, pytest.approx(theirs.logprob, abs=1e-4))
        both.wait_until_idle()
        into, out = both.decode.engine.stats().handoffs, both.prefill.engine.stats().handoffs
    assert (into.received, into.fallen_back, out.sent, out.failed) == (len(LENGTHS), 0, len(LENGTHS), 0)
    there = Side(Layout.parse(decode), other_page)
    units = sum(len(kept(spec, there, length)) for length in LENGTHS)
    assert out.sent_bytes == units * head_bytes(spec, "float32")


def test_pairs_are_as_many_as_they_should_be() -> None:
    assert len({(one, other) for _, one, other in PAIRS}) >= 40
    assert {family_for(at, one, other) for at, one, other in PAIRS} == set(FAMILIES)
    assert {PAGES[at % 3] for at, *_ in PAIRS} == set(PAGES)


@pytest.mark.parametrize(
    ("name", "pages"), [("gqa", (4, 16)), *long(("one head", (4, 16)), ("one head", (16, 4)), ("mla", (16, 4)))], ids=str
)
def test_heads_replicated_beyond_their_number_and_unlike_pages(name: str, pages: tuple[int, int]) -> None:
    """Two KV heads, one, or latents, under a tp of 1, 2 and 4 on either side."""
    lengths, layouts = (1, 4, 5, 33), ("", "tp=2", "tp=4")
    with in_process(model_of(name), "", config(16)) as replica:
        expected = [replica.run(greedy(length)).tokens for length in lengths]
    for prefill in layouts:
        for decode in layouts:
            with pools(model_of(name), prefill, decode, config(pages[0]), config(pages[1])) as both:
                waiting = [both.submit(greedy(length)) for length in lengths]
                assert [both.decode.finish(events).tokens for events in waiting] == expected, (prefill, decode)
                assert both.decode.engine.stats().handoffs.received == len(lengths)


def test_a_prompt_that_the_decode_side_holds_is_not_handed_off() -> None:
    model, first = tiny("llama3"), greedy(64)
    longer = greedy(64, request_id="longer", prompt=[*first.prompt, *range(1, 40)])
    barely = greedy(64, request_id="barely", prompt=[*first.prompt, *range(1, 40), 5, 6])
    with in_process(model, "", config(16)) as replica:
        expected = [replica.run(each).tokens for each in (first, longer, barely)]
    with pools(model, "tp=2", "pp=2", config(16), config(16), least_tokens=16) as both:
        assert [both.run(each).tokens for each in (first, longer, barely)] == expected
        assert [(ticket.first, ticket.tokens) for ticket in both.tickets] == [(0, 64), (64, 103)]
        assert both.run(greedy(15)).tokens == alone("gqa")["r15"].tokens  # too short
        assert len(both.tickets) == 2
        stats = both.prefill.engine.stats()
        assert stats.cache_hit_tokens == 64  # its blocks are still cached
        both.wait_until_idle()


def test_prompt_logprobs_come_from_the_prefill_side() -> None:
    on_prefill_request = greedy(33, sampling=SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=2))
    with in_process(tiny("llama3"), "", config(16)) as replica:
        expected = replica.run(on_prefill_request)
    with pools(tiny("llama3"), "tp=2", "cp=2", config(16), config(16)) as both:
        found = both.run(on_prefill_request)
        assert both.decode.engine.stats().handoffs.received == 1
    assert found.tokens == expected.tokens
    assert found.prompt_logprobs[0] is None
    for ours, theirs in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert (ours.token, ours.logprob) == (theirs.token, pytest.approx(theirs.logprob, abs=1e-4))


@pytest.mark.parametrize(("prefill", "decode"), [("tp=2,ep=2", "attn_dp=2,ep=2"), ("attn_dp=2,ep=2", "pp=2")])
def test_a_model_with_experts(prefill: str, decode: str) -> None:
    """Plans without rows, which only say what to expect, run past experts of all DP ranks."""
    with in_process(tiny("mixtral"), "", config(16)) as replica:
        expected = [replica.run(greedy(length)).tokens for length in LENGTHS]
    with pools(tiny("mixtral"), prefill, decode, config(16), config(16)) as both:
        waiting = [both.submit(greedy(length)) for length in LENGTHS]
        assert [both.decode.finish(events).tokens for events in waiting] == expected
        assert both.decode.engine.stats().handoffs.received == len(LENGTHS)


@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", "pp=2"), *long(("attn_dp=2", "tp=3"), ("pp=3", "cp=2"))])
def test_pools_whose_blocks_outlive_the_device(tmp_path: Path, prefill: str, decode: str) -> None:
    """A prompt's front comes from the tiers of the prefill side, the rest is computed, and all of it is handed off. What
    preemptions on the decode side lose comes back from its own."""
    model, texts = tiny("llama3"), prompts(7, 14)
    expected = answers(model, texts)
    settings = TierConfig(host_cache=64 << 20, disk_cache=tmp_path)
    one, other = (tiered(model, layout, 30, settings)[0] for layout in (prefill, decode))
    with pools(model, prefill, decode, one, other, expected_tokens=2) as both:
        for turn in range(3):
            waiting = [both.submit(request(f"{turn}-{at}", text)) for at, text in enumerate(texts)]
            assert [both.decode.finish(events).tokens for events in waiting] == expected
        both.wait_until_idle()
        assert both.decode.engine.stats().handoffs.received > len(texts)
        assert both.prefill.engine.stats().tier_found_tokens > 0


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_first_token_that_ends_the_request(max_tokens: int) -> None:
    first = alone("gqa")["r33"].tokens[0]
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(first,) if max_tokens > 1 else ())
    on_prefill_request = greedy(33, max_tokens=max_tokens, sampling=sampling)
    with pools(tiny("llama3"), "", "tp=2", config(16), config(16)) as both:
        found = both.run(on_prefill_request)
        both.wait_until_idle()
        stats = both.decode.engine.stats().handoffs
        assert (stats.reserved, stats.draining) == (0, 0)
    assert (found.tokens, found.finish) == ([first], "stop" if max_tokens > 1 else "length")


@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", "pp=2"), *long(("cp=2", "attn_dp=2"))])
def test_mixed_load_equals_one_rank(prefill: str, decode: str) -> None:
    """Many at once, with aborts, preemptions on the decode side and prefixes that both sides share."""
    model, work = tiny("llama3"), random_requests(60, seed=11)
    sizes = {"max_model_len": 96, "max_waiting": 200}
    roomy = EngineConfig(block_size=4, num_blocks=400, max_batch_tokens=64, max_sequences=16, **sizes)
    with in_process(model, "", roomy) as replica:
        expected = {each.request_id: replica.run(each) for each in work}
    cramped = roomy.model_copy(update={"num_blocks": 40})
    aborted = {each.request_id for each in work[::9]}
    with pools(model, prefill, decode, cramped, cramped, expected_tokens=2) as both:
        waiting = [(each.request_id, both.submit(each)) for each in work]
        for name in aborted:
            both.decode.engine.cancel(name)
        for name, events in waiting:
            found = both.decode.finish(events)
            if found.finish == "abort":
                assert name in aborted
            else:
                assert (found.tokens, found.finish) == (expected[name].tokens, expected[name].finish), name
        both.wait_until_idle()
        stats = both.decode.engine.stats()
    assert stats.preemptions > 0
    assert stats.handoffs.received > 30


def test_engines_of_no_pool_refuse_handoffs() -> None:
    with in_process(tiny("llama3"), "", config(16)) as replica, pytest.raises(InvalidRequest, match="belongs to no pool"):
        replica.run(greedy(16, reserves=True))


def test_the_battery_would_see_one_wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last position of a copy is written with the values of the one before."""

    def stale(copy: Copy, table: PageTable) -> torch.Tensor:
        slots = copy_slots(copy, table)
        return slots if len(slots) < 2 else torch.cat((slots[:-1], slots[-2:-1]))

    monkeypatch.setattr("actors.kv_transfer.endpoint.copy_slots", stale)
    with pools(tiny("llama3"), "tp=2", "pp=2", config(16), config(16)) as both:
        found, right = both.run(greedy(33)), alone("gqa")["r33"]
    assert found.logprobs[0].logprob == pytest.approx(right.logprobs[0].logprob, abs=1e-4)  # the first token is the prefill's
    assert abs(found.logprobs[1].logprob - right.logprobs[1].logprob) > 1e-3
