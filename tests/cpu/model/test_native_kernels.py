"""The compiled CPU kernels against torch, and how they are compiled and chosen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from actors.model.kernels.linear import embedding
from actors.model.kernels.native import compiler
from actors.model.kernels.native.compiler import CompileError, compiled
from actors.model.kernels.native.library import OF_THREAD, Library, start
from actors.model.kernels.native.program import NotRecordable, Program, in_program

TYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def native() -> Library:
    try:
        return Library(compiled())
    except CompileError as error:
        pytest.skip(str(error))


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether `got` is `wanted` (fp32), up to the rounding of `dtype`."""
    assert got.dtype is dtype
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 3e-6}[dtype]
    return torch.allclose(got.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 576), (5, 7), (3, 4, 1), (33, 1000), (0, 16), (2, 9, 64)])
def test_rms_norm_is_that_of_torch(native: Library, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert close(native.rms_norm(x, weight, 1e-5), F.rms_norm(x.float(), shape[-1:], weight.float(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm_takes_heads_of_a_wider_matrix(native: Library, dtype: torch.dtype) -> None:
    heads = torch.randn(5, 9, 32).to(dtype)[:, 2:6]
    weight = torch.randn(32).to(dtype)
    assert close(native.rms_norm(heads, weight, 1e-6), F.rms_norm(heads.float(), (32,), weight.float(), 1e-6), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_gated_silu_is_that_of_torch_from_the_smallest_to_the_largest_values(native: Library, dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38])))
    gate_up = torch.cat((gate, torch.randn(len(gate)))).to(dtype)[None]
    wanted = F.silu(gate_up[:, : len(gate)]).mul(gate_up[:, len(gate) :])
    assert close(native.silu_mul(gate_up), wanted.float(), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", [1, 12])
def test_rotation_is_that_of_its_formula(native: Library, heads: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, heads * 24 + 5).to(dtype)[:, : heads * 24].view(7, heads, 24)
    angles = torch.randn(7, 1, 12)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    wanted = x.float() * cos + x.float().roll(12, -1) * sin
    assert close(native.rotate(x, cos, sin), wanted, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_keys_are_stored_at_their_slots_and_nowhere_else(native: Library, dtype: torch.dtype) -> None:
    plane = torch.zeros(3, 40, 8, dtype=dtype)
    x, slots = torch.randn(4, 5, 8).to(dtype)[:, 1:4], torch.tensor([39, -1, 0, 17])
    native.write_plane(x, slots, plane)
    wanted = torch.zeros_like(plane).index_copy_(1, slots[[0, 2, 3]], x[[0, 2, 3]].transpose(0, 1))
    assert torch.equal(plane, wanted)


def rows_of(seed: int, kv_heads: int, group: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random arguments of `Library.paged_attention`, with rows of 1 to 700 tokens."""
    made = torch.Generator().manual_seed(seed)
    blocks, rows = 90, 7
    stops = torch.tensor([1, 16, 17, 256, 257, 512, 700], dtype=torch.int32)[torch.randperm(rows, generator=made)]
    firsts = (stops * torch.rand(rows, generator=made)).int().clamp(max=15).minimum(stops - 1)
    return {
        "q": torch.randn(rows, kv_heads * group, key_dim, generator=made).to(dtype),
        "keys": torch.randn(kv_heads, blocks, 16, key_dim, generator=made).to(dtype),
        "values": torch.randn(kv_heads, blocks, 16, value_dim, generator=made).to(dtype),
        "tables": torch.randint(0, blocks, (rows, 44), generator=made).int(),
        "firsts": firsts,
        "stops": stops,
    }


def by_formula(
    given: dict[str, Tensor], scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp that `given` should give, in fp32."""
    outs, lses = [], []
    group = given["q"].shape[1] // len(given["keys"])
    for row, table in enumerate(given["tables"].long()):
        visible = slice(int(given["firsts"][row]), int(given["stops"][row]))
        keys, values = (
            given[name][:, table].flatten(1, 2)[:, visible].float().repeat_interleave(group, 0) for name in ("keys", "values")
        )
        scores = torch.einsum("hd,htd->ht", given["q"][row].float(), keys) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        lses.append(scores.logsumexp(-1))
        with_sink = scores if sinks is None else torch.cat((scores, sinks[:, None]), -1)
        outs.append(torch.einsum("ht,htd->hd", with_sink.softmax(-1)[:, : scores.shape[1]], values))
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", [(3, 3, 64, 64), (1, 5, 24, 24), (1, 16, 80, 64), (4, 1, 7, 3)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
def test_paged_attention_is_that_of_its_formula(
    native: Library, heads: tuple[int, int, int, int], kind: str, dtype: torch.dtype
) -> None:
    given = rows_of(1, *heads, dtype)
    softcap = 20.0 if kind == "softcap" else None
    sinks = torch.randn(heads[0] * heads[1]) * 4 if kind == "sinks" else None
    wanted, wanted_lse = by_formula(given, 0.3, softcap, sinks)
    lse = None if kind == "sinks" else torch.empty(wanted_lse.shape)
    assert close(native.paged_attention(**given, scale=0.3, softcap=softcap, sinks=sinks, lse=lse), wanted, dtype)
    assert lse is None or torch.allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_the_other_rows_in_any_bit(native: Library, dtype: torch.dtype) -> None:
    given = rows_of(2, 3, 3, 64, 64, dtype)
    together = native.paged_attention(**given, scale=0.125)
    for row in range(len(together)):
        alone = {name: x if name in ("keys", "values") else x[row : row + 1] for name, x in given.items()}
        assert torch.equal(native.paged_attention(**alone, scale=0.125)[0], together[row])


def test_a_nan_in_the_cache_is_not_hidden_and_stays_in_its_row(native: Library) -> None:
    given = rows_of(3, 1, 2, 16, 16, torch.float32)
    given["tables"] = torch.arange(7)[:, None].expand(7, 44).contiguous().int()
    given["keys"][0, 4] = torch.nan
    out = native.paged_attention(**given, scale=1.0)
    assert [bool(row.isnan().any()) for row in out] == [row == 4 for row in range(7)]


def test_large_scores_do_not_overflow(native: Library) -> None:
    given = rows_of(4, 1, 2, 16, 16, torch.float32)
    given["q"] *= 1000
    wanted, _ = by_formula(given, 1.0)
    assert torch.allclose(native.paged_attention(**given, scale=1.0), wanted, atol=1e-3)


def test_a_compiled_library_is_kept_and_another_source_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: Library
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    first = compiled(env)
    made = first.stat().st_mtime_ns
    assert compiled(env) == first
    assert first.stat().st_mtime_ns == made
    changed = tmp_path / "kernels.cpp"
    changed.write_text(compiler.SOURCE.read_text() + "// another\n")
    monkeypatch.setattr(compiler, "SOURCE", changed)
    assert compiled(env) != first


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: Library) -> None:
    broken = tmp_path / "kernels.cpp"
    broken.write_text("int nothing( {")
    monkeypatch.setattr(compiler, "SOURCE", broken)
    with pytest.raises(CompileError, match=r"ended with 1: .*error"):
        compiled({"XDG_CACHE_HOME": str(tmp_path)})
    assert not list(tmp_path.rglob("*.so")) + list(tmp_path.rglob("*.tmp"))


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="apt-get install g"):
        compiled({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="SHARDWRIGHT_KERNELS must be one of auto, native, torch, not 'fast'"):
        start("fast")


def test_a_process_without_a_compiler_goes_on_with_torch_and_warns_once(tmp_path: Path) -> None:
    code = """
import logging, torch
logging.basicConfig(level="WARNING")
from actors.model.kernels.native.library import library, start, wait
start(); start(); wait()
print(library(torch.zeros(1)))
"""
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "None"
    assert done.stderr.count("apt-get install g++") == 1, done.stderr


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_are_those_of_torch_and_repeat_one_row(native: Library, dtype: torch.dtype) -> None:
    a, b = torch.randn(33, 700).to(dtype), torch.randn(33, 700).to(dtype)
    assert torch.equal(native.add(a, b), a + b)
    assert torch.equal(native.add(a, b[:1].expand_as(a)), a + b[:1])


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 17, 32, 33, 300])
@pytest.mark.parametrize("shape", [(32, 32), (96, 576), (1024, 64)], ids=str)
def test_packed_products_are_right_to_their_rounding(native: Library, rows: int, shape: tuple[int, int]) -> None:
    if not native.packs:
        pytest.skip("this CPU has no bfloat16 instructions")
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    x = torch.randn(rows, shape[1] + 3).bfloat16()[:, : shape[1]]
    wanted = x.double() @ weight.double().t()
    packed = native.pack(weight)
    for got, exact in ((native.linear(x, packed, None), wanted), (native.linear(x, packed, bias), wanted + bias)):
        assert torch.allclose(got.double(), exact, rtol=2**-8, atol=1e-4)
    assert torch.equal(native.linear(x[-1:], packed, None), native.linear(x, packed, None)[-1:]), "a row depends on the others"


def test_an_embedding_reads_rows_of_a_packed_weight(native: Library) -> None:
    if not native.packs:
        pytest.skip("this CPU has no bfloat16 instructions")
    weight, ids = torch.randn(160, 96).bfloat16(), torch.tensor([0, 159, 31, 32, 17, 17])
    assert torch.equal(embedding(ids, native.pack(weight)), weight[ids])
    assert embedding(ids[:0], native.pack(weight)).shape == (0, 96)


def test_a_program_runs_again_on_new_inputs(native: Library) -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)

    def compute() -> Tensor:
        normed = native.rms_norm(x, weight, 1e-5)
        doubled = in_program(lambda part: part * 2, normed)
        return native.add(doubled, native.silu_mul(both))

    both = torch.cat((x, x), 1)
    with torch.inference_mode():
        program = Program(native)
        assert torch.equal(program.record(compute), compute())
        x.normal_()
        both.copy_(torch.cat((x, x), 1))
        assert torch.equal(program.run(), compute())
        assert program.nbytes > 0


@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: x.add_(1), lambda x: torch.zeros(3), lambda x: x.sum().item()],
    ids=["sum", "in place", "allocation", "number"],
)
def test_a_program_refuses_what_it_would_miss(native: Library, compute: Callable[[Tensor], Any]) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(NotRecordable):
        Program(native).record(lambda: compute(x))
    assert OF_THREAD.recorder is None
