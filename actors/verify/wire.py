"""The messages between the worker pool and its workers: one byte for the kind, then msgpack, JSON or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import safetensors.torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from actors.verify.recorder import StepRecord
from actors.verify.routes import LayerRoutes, Routes
from actors.wire.rank_config import RankConfig, Rendezvous

START, PLAN, TAKE, BYE, QUIT = b"S", b"P", b"T", b"B", b"Q"
"""Kinds of messages to a worker: start a rank, run a plan, return the records, end the rank, end the process."""
READY, RESULT, RECORDS, FAILED, DONE = b"r", b"a", b"t", b"f", b"d"
"""Kinds of messages from a worker: the rank is ready, a step result, the records, the rank has failed, the rank has ended."""


class Start(BaseModel):
    """The message that makes a worker run a rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: RankConfig
    rendezvous: Rendezvous
    num_blocks: int


def pack_start(start: Start, routes: Routes | None) -> bytes:
    """Returns the body of a `START` message: `start` as JSON and the expert routes to replay (None: the rank routes tokens
    itself) as safetensors."""
    tensors: dict[str, Tensor] = {}
    for layer, of_layer in (routes or {}).items():
        tensors |= {f"{layer}.inputs": of_layer.inputs, f"{layer}.experts": of_layer.experts}
    layers = None if routes is None else list(routes)
    packed: bytes = msgpack.packb([start.model_dump_json(), layers, safetensors.torch.save(tensors)])
    return packed


def unpack_start(data: bytes) -> tuple[Start, Routes | None]:
    """Returns the message and the routes from `data`, which `pack_start` packed. Raises pydantic's `ValidationError` if the
    message has other fields."""
    start, layers, packed = msgpack.unpackb(data)
    tensors = safetensors.torch.load(packed)
    routes = {layer: LayerRoutes(tensors[f"{layer}.inputs"], tensors[f"{layer}.experts"]) for layer in layers or ()}
    return Start.model_validate_json(start), None if layers is None else routes


def pack_records(records: Sequence[StepRecord]) -> bytes:
    """Returns the body of a `RECORDS` message, which `unpack_records` reads: the records in msgpack, with all their tensors as
    one safetensors byte string.
    """
    tensors: dict[str, Tensor] = {}
    heads = []
    for at, record in enumerate(records):
        tensors |= {f"{at}.hidden.{layer}": values.contiguous() for layer, values in record.hidden.items()}
        tensors |= {f"{at}.logits.{call}": values.contiguous() for call, (_, values) in enumerate(record.logits)}
        heads.append([record.step, record.keys, list(record.hidden), [keys for keys, _ in record.logits], record.unknown])
    packed: bytes = msgpack.packb([heads, safetensors.torch.save(tensors)])
    return packed


def unpack_records(data: bytes) -> list[StepRecord]:
    """Returns the records from `data`, which `pack_records` packed."""
    heads, packed = msgpack.unpackb(data, use_list=False)
    tensors = safetensors.torch.load(packed)
    return [_record(at, head, tensors) for at, head in enumerate(heads)]


def _record(at: int, head: Sequence[Any], tensors: dict[str, Any]) -> StepRecord:
    step, keys, layers, calls, unknown = head
    return StepRecord(
        step=step,
        keys=list(keys),
        hidden={layer: tensors[f"{at}.hidden.{layer}"] for layer in layers},
        logits=[(list(rows), tensors[f"{at}.logits.{call}"]) for call, rows in enumerate(calls)],
        unknown=list(unknown),
    )
