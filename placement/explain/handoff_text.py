"""The text and JSON form of a KV hand-off map between two pools (prefill/decode disaggregation): copies per rank, bytes per
token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from placement.cost.units import size_text
from placement.explain.columns import columns
from placement.explain.drawing import runs_text
from placement.layout.layout import Layout
from placement.model.spec import DTYPE_BYTES, DType, ModelSpec
from placement.ownership.handoff import Copy, Side, handoff, sequence_bytes


@dataclass(frozen=True)
class HandoffExplanation:
    """The copies of a prompt of `tokens` tokens from DP rank 0 of a prefill replica to DP rank 0 of a decode replica."""

    spec: ModelSpec
    prefill: Layout
    decode: Layout
    tokens: int
    dtype: DType
    copies: Sequence[Copy]

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the prompt's KV cache in all layers, each value counted once."""
        return sequence_bytes(self.spec, self.tokens, self.dtype)

    @property
    def moved_bytes(self) -> int:
        """Bytes that all copies move: more than `prompt_bytes` if several decode ranks keep the same KV."""
        return sum(self.bytes_of(copy) for copy in self.copies)

    def bytes_of(self, copy: Copy) -> int:
        """Returns the number of bytes that one of the copies transfers."""
        return copy.num_bytes(self.spec, self.dtype)

    def bytes_by_rank(self, end: str) -> dict[int, int]:
        """Returns the bytes moved by world rank of one end: `end` is ``source`` (sent by prefill ranks) or ``destination``
        (received by decode ranks). Ranks without any are left out."""
        found: Counter[int] = Counter()
        for copy in self.copies:
            found[getattr(copy, end)] += self.bytes_of(copy)
        return dict(sorted(found.items()))


def explain_handoff(spec: ModelSpec, prefill: Layout, decode: Layout, tokens: int, dtype: DType) -> HandoffExplanation:
    """Returns the copies of a prompt's KV cache from a prefill to a decode replica. Both layouts must have passed
    `placement.legality.check`; `tokens` is the length of the prompt (at least 1), `dtype` the type of both KV caches, whose
    pages have the same number of tokens. Raises `ModelError` if the model has several attention kinds, or values of another
    size than keys."""
    return HandoffExplanation(spec, prefill, decode, tokens, dtype, handoff(spec, Side(prefill), Side(decode), range(tokens)))


def handoff_json(found: HandoffExplanation, name: str) -> dict[str, Any]:
    """Returns the explanation as plain values that can be written as JSON; `name` is the model's name in it. Byte counts are
    exact; bytes per token are floats where they do not divide evenly."""
    return {
        "model": name,
        "prefill": str(found.prefill),
        "decode": str(found.decode),
        "tokens": found.tokens,
        "dtype": found.dtype,
        "prompt_bytes": found.prompt_bytes,
        "prompt_bytes_per_token": found.prompt_bytes // found.tokens,
        "moved_bytes": found.moved_bytes,
        "moved_bytes_per_token": _each(found.moved_bytes, found.tokens),
        "copies": [_copy_json(found, copy) for copy in found.copies],
        "sent_bytes": found.bytes_by_rank("source"),
        "received_bytes": found.bytes_by_rank("destination"),
    }


def handoff_text(found: HandoffExplanation, name: str) -> str:
    """Returns the report on a hand-off: bytes of the prompt, a table of all copies, and the most loaded rank of each side.
    `name` is the model's name in its title."""
    sections = (_head(found, name), _copies(found), _ranks(found))
    return "\n\n".join("\n".join(section) for section in sections)


def _head(found: HandoffExplanation, name: str) -> Iterator[str]:
    spec, tokens = found.spec, found.tokens
    yield f"{name}: prefill {found.prefill} hands KV to decode {found.decode}"
    kept = f"2 x {spec.num_kv_heads} KV heads x {spec.kv_dim}" if spec.mla is None else f"a latent of {spec.kv_dim}"
    each = f"{spec.num_layers} layers x {kept} x {DTYPE_BYTES[found.dtype]} B ({found.dtype})"
    yield f"{found.prompt_bytes // tokens:,} B a prompt token: {each}"
    yield f"a prompt of {tokens:,} tokens: {size_text(found.prompt_bytes)}"
    if found.moved_bytes > found.prompt_bytes:
        times = found.moved_bytes / found.prompt_bytes
        moved = f"{size_text(found.moved_bytes)} move ({times:.2f}x)"
        yield f"  {moved}: decode ranks that keep the same each get their own"
    with_dp = [f"{what} {layout.attn_dp}" for what, layout in _sides(found) if layout.attn_dp > 1]
    if with_dp:
        yield f"  from DP rank 0 to DP rank 0 (of DP ranks: {', '.join(with_dp)}); between others the copies are alike"


def _sides(found: HandoffExplanation) -> tuple[tuple[str, Layout], tuple[str, Layout]]:
    return ("prefill", found.prefill), ("decode", found.decode)


def _copies(found: HandoffExplanation) -> Iterator[str]:
    count = len(found.copies)
    yield f"{count} cop{'y' if count == 1 else 'ies'}"
    heads = "kv heads" if found.spec.mla is None else "latents"
    rows = [("prefill", "decode", "layers", heads, "positions", "B a token", "together")]
    for copy in found.copies:
        moved = found.bytes_of(copy)
        ranks = (f"rank {copy.source}", f"rank {copy.destination}")
        held = "whole" if found.spec.mla is not None else runs_text(copy.kv_heads)
        what = (runs_text(copy.layers), held, str(copy.positions))
        rows.append((*ranks, *what, f"{_each(moved, found.tokens):,}", size_text(moved)))
    yield from columns(rows, right={5, 6})


def _ranks(found: HandoffExplanation) -> Iterator[str]:
    """Yields the most loaded rank of each side, compared with the mean."""
    for what, end, layout in (("sends", "source", found.prefill), ("receives", "destination", found.decode)):
        moved = found.bytes_by_rank(end)
        most = max(moved, key=lambda rank: moved[rank])
        idle = layout.world // layout.attn_dp - len(moved)
        without = f"; {idle} of the DP rank's ranks send or receive nothing" if idle else ""
        side = "prefill" if end == "source" else "decode"
        mean = found.moved_bytes / len(moved)
        yield f"{side} rank {most} {what} most: {size_text(moved[most])}, {moved[most] / mean:.2f}x the mean{without}"


def _copy_json(found: HandoffExplanation, copy: Copy) -> dict[str, Any]:
    moved = found.bytes_of(copy)
    return {
        "source": copy.source,
        "destination": copy.destination,
        "layers": [copy.layers.start, copy.layers.stop],
        "kv_heads": [copy.kv_heads.start, copy.kv_heads.stop],
        "positions": {"period": copy.positions.period, "runs": [[run.start, run.stop] for run in copy.positions.runs]},
        "num_positions": len(copy.positions),
        "bytes": moved,
        "bytes_per_token": _each(moved, found.tokens),
    }


def _each(total: int, tokens: int) -> int | float:
    return total // tokens if total % tokens == 0 else round(total / tokens, 2)
