"""Memory of a step beyond weights and KV: the bound that the KV budget counts on holds, and is not far above what is used.

Each step runs in a process of its own, which reports the anonymous memory that it adds at its peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from placement.cost.activations import StepLimits, activation_bytes, scored_rows
from placement.layout.layout import Layout
from placement.model.moe_spec import MoESpec
from placement.model.spec import DType, ModelSpec
from placement.ownership.shards import whole_model
from tests.support.long_cases import long
from tests.support.models.checkpoint_checks import llama_spec

DENSE = llama_spec(
    hidden_size=1024, num_layers=2, num_heads=16, num_kv_heads=4, head_dim=64, intermediate_size=4096, vocab_size=65536
)
SLACK_BYTES = 104 << 20
"""Thread stacks, kernels' own buffers, and the plan, with its lists of tokens; and 64 MiB of freed memory, which glibc may keep
at the top of the heap (twice its largest threshold for maps)."""

CHILD = """
import ctypes, gc, json, re, sys
from pathlib import Path
import torch
from actors.groups.solo import SoloGroup
from actors.model.decoder import Decoder
from actors.rank.assembly import identity_of, assemble_parts
from actors.rank import assembly
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.rank_config import RankConfig
from actors.wire.requests import SamplingParams
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec

case = json.loads(sys.argv[2])
torch.set_num_threads(1)
spec = ModelSpec.model_validate_json(sys.argv[1])
config = RankConfig(world_rank=0, layout=Layout(), spec=spec, model_path="", device="cpu", dtype=case["dtype"], block_size=16)
assembly.load = lambda *_: None  # random weights will do
assembly.open_source = lambda *_: open("/dev/null")
groups = {axis: SoloGroup(axis) for axis in mesh.talking_axes(spec)}
decoder = assembly.load_decoder(config, identity_of(config), groups)
with torch.no_grad():
    for weight in decoder.parameters():
        weight.fill_(0.01)
rows, new, context = case["rows"], case["new"], case["context"]
blocks = -(-(new + context) // 16)
parts = assemble_parts(config, identity_of(config), groups, decoder, rows * blocks)
sampling = SamplingParams(temperature=0.7, seed=1, **case["sampling"])
tokens = [token % 1000 for token in range(new + context)]
starts = [SequenceStart(sequence_id=at, tokens=tokens, prompt_length=len(tokens), sampling=sampling) for at in range(rows)]

def field(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def plan(step, first, count, started, each):
    tables = [list(range(at * blocks, at * blocks + each)) for at in range(rows)]
    made = [Row(sequence_id=at, start=first, count=count, new_blocks=tables[at], sample=True) for at in range(rows)]
    return StepPlan(step=step, started=started, rows=made)

for cache in parts.cache.parts.values():  # commit the pages, which are counted as KV
    for layer in cache.layers:
        for pages in cache.flat_pages(layer):
            pages.fill_(0.01)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = field("RssAnon")
parts.runner.step(plan(0, context, new, starts, blocks))
files = field("VmRSS") - field("RssAnon")  # with the parts of libraries that the step has touched first
print(field("VmHWM") - files - before)
"""

CASES: dict[str, dict[str, Any]] = {
    "one long prompt": {"dtype": "float32", "rows": 1, "new": 2048, "context": 0, "sampling": {}},
    "a chunk of a long prompt, bf16": {"dtype": "bfloat16", "rows": 1, "new": 1024, "context": 4096, "sampling": {}},
    "decodes": {"dtype": "float32", "rows": 48, "new": 1, "context": 1023, "sampling": {"top_p": 0.9, "logprobs": 5}},
    "decodes with edited logits": {
        "dtype": "bfloat16",
        "rows": 64,
        "new": 1,
        "context": 31,
        "sampling": {"presence_penalty": 1},
    },
    "a scored prompt": {"dtype": "float32", "rows": 1, "new": 1024, "context": 0, "sampling": {"prompt_logprobs": 5}},
}


@pytest.mark.parametrize("name", ["one long prompt", *long(*sorted({*CASES} - {"one long prompt"}))])
def test_a_step_takes_no_more_than_its_bound(name: str) -> None:
    case = CASES[name]
    limits = StepLimits(case["rows"] * case["new"], case["rows"], case["new"] + case["context"])
    bound = activation_bytes(DENSE, Layout(), whole_model(DENSE), case["dtype"], limits, gathers=True)
    used = peak_bytes(DENSE, case)
    assert bound / 4 < used < bound + SLACK_BYTES, f"{used:,} bytes used, {bound:,} counted"


@pytest.mark.long
def test_experts_take_no_more_than_their_bound() -> None:
    spec = DENSE.model_copy(update={"moe": MoESpec(num_experts=8, top_k=2, expert_size=2048, layers=(0, 1))})
    case = {"dtype": "float32", "rows": 1, "new": 2048, "context": 0, "sampling": {}}
    bound = activation_bytes(spec, Layout(), whole_model(spec), "float32", StepLimits(2048, 1, 2048), gathers=True)
    used = peak_bytes(spec, case)
    assert bound / 4 < used < bound + SLACK_BYTES, f"{used:,} bytes used, {bound:,} counted"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounds_grow_with_the_step_and_shrink_with_the_layout(dtype: DType) -> None:
    def bound(tokens: int, sequences: int, length: int, gathers: bool = True) -> int:
        return activation_bytes(DENSE, Layout(), whole_model(DENSE), dtype, StepLimits(tokens, sequences, length), gathers)

    assert bound(2048, 64, 8192) > bound(1024, 64, 8192)
    assert bound(256, 256, 512) > bound(256, 64, 512)
    assert bound(16, 1, 1 << 20) > bound(16, 1, 1 << 18) > bound(16, 1, 1 << 18, gathers=False)


def test_pieces_of_a_scored_prompt_are_bounded_in_bytes_and_never_empty() -> None:
    assert scored_rows(1000) == 256
    assert scored_rows(1 << 17) * (1 << 17) * 4 <= 32 << 20
    assert scored_rows(1 << 40) == scored_rows(0) - 255 == 1


def peak_bytes(spec: ModelSpec, case: dict[str, Any]) -> int:
    command = [sys.executable, "-c", CHILD, spec.model_dump_json(), json.dumps(case)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
