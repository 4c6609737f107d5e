"""Memory while loading: a rank's own parameters and a small chunk, whatever the size of the checkpoint.

Only anonymous memory counts. Pages of the mapped file are page cache: shared between the ranks of a host, and taken
back by the kernel when memory is short.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.spec import ModelSpec
from placement.ownership.shards import parameters, shard, weight_elements
from placement.ownership.weight_slices import WeightSlice
from tests.support.long_cases import long
from tests.support.models.checkpoint_checks import llama_spec

torch.set_num_threads(1)

SPEC = llama_spec(
    hidden_size=1024, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=64, intermediate_size=4096, vocab_size=16384
)
"""94 million weights: 188 MB in bf16."""

LAYOUT = Layout(tp=2)
DEADLINE_S = 120.0
SLACK_BYTES = 16 << 20
"""Chunks, allocator rounding, and what torch allocates at its first copy."""

CHILD = """
import sys
import torch
from actors.model.checkpoint.load import load
from actors.model.checkpoint.open_source import open_source
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.spec import ModelSpec
from placement.ownership.shards import parameters, shard

torch.set_num_threads(1)
spec, layout = ModelSpec.model_validate_json(sys.argv[2]), Layout.parse(sys.argv[3])
own = shard(spec, layout, coords_of(layout, 0))
print("ready", flush=True)
sys.stdin.readline()
weights = {p.name: torch.zeros(p.shape, dtype=torch.bfloat16) for p in parameters(spec, own)}
load(weights, spec, own, open_source(sys.argv[1], spec))
print("loaded", flush=True)
"""


def write_safetensors(path: Path) -> None:
    save_file({weight_slice.source: torch.rand(weight_slice.source_shape).bfloat16() for weight_slice in slices()}, path)


def write_gguf(path: Path) -> None:
    """Random Q8_0 blocks; their values do not matter here."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SPEC.num_layers)
    writer = gguf.GGUFWriter(path, "llama")
    draw = np.random.default_rng(0)
    for weight_slice in slices():
        name = names.get_name(weight_slice.source, try_suffixes=(".weight",))
        if len(weight_slice.source_shape) == 1:
            writer.add_tensor(name, np.ones(weight_slice.source_shape, np.float32))
            continue
        rows, columns = weight_slice.source_shape
        blocks = draw.integers(0, 256, (rows, columns // 32 * 34), np.uint8)
        blocks[:, 1::34] = 0  # the high byte of each scale: small, and never infinite
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def slices() -> list[WeightSlice]:
    whole = shard(SPEC, Layout(), coords_of(Layout(), 0))
    return [weight_slice for parameter in parameters(SPEC, whole) for weight_slice in parameter.slices]


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def growth_while_loading(path: Path, spec: ModelSpec, layout: Layout) -> int:
    """How many bytes of anonymous memory a process of its own gains, at most, by making and loading rank 0."""
    command = [sys.executable, "-c", CHILD, str(path), spec.model_dump_json(), str(layout)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            before = peak = anonymous_bytes(child.pid)
            child.stdin.write("go\n")
            child.stdin.close()
            until = time.monotonic() + DEADLINE_S
            while child.poll() is None:
                peak = max(peak, anonymous_bytes(child.pid))
                assert time.monotonic() < until, f"loading {path} took more than {DEADLINE_S} s"
            assert child.stdout.read() == "loaded\n"
        finally:
            child.kill()
    return peak - before


@pytest.mark.parametrize("write", [write_safetensors, *long(write_gguf)])
def test_a_rank_needs_its_own_bytes_and_little_more(tmp_path, write):
    if not Path("/proc/self/status").exists():
        pytest.skip("this system has no /proc, where resident memory is read")
    path = tmp_path / ("model.gguf" if write is write_gguf else "model.safetensors")
    write(path)
    own_bytes = 2 * weight_elements(SPEC, shard(SPEC, LAYOUT, coords_of(LAYOUT, 0)))
    growth = growth_while_loading(path, SPEC, LAYOUT)
    assert 0.9 * own_bytes < growth <= own_bytes + SLACK_BYTES, f"{growth} bytes for {own_bytes} of its own"
