"""What changes a model's digest, and what does not."""

from __future__ import annotations

import hashlib
import random

import pytest

from placement.model.digest import CHUNK_BYTES, chunk_digest, model_digest, num_chunks
from placement.model.spec import RopeSpec
from tests.support.kv.handoff_cases import heads_model

CHUNK = ("model.norm.weight", "BF16", (3, 2), 0, hashlib.sha256(b"values").digest())


def test_neither_the_order_of_chunks_nor_the_rank_that_hashed_them_matters() -> None:
    chunks = [chunk_digest(*CHUNK[:3], at, CHUNK[4]) for at in range(20)]
    expected = model_digest(heads_model(2), [b"".join(chunks)])
    assert len(expected) == 64
    random.Random(1).shuffle(chunks)
    assert model_digest(heads_model(2), [b"".join(chunks[:7]), b"", b"".join(chunks[7:])]) == expected


def test_a_chunk_more_less_or_twice_is_another_model() -> None:
    chunks = [chunk_digest(*CHUNK[:3], at, CHUNK[4]) for at in range(3)]
    shares = [chunks, chunks[:2], chunks[1:], [*chunks, chunks[0]], []]
    assert len({model_digest(heads_model(2), share) for share in shares}) == len(shares)


def test_whatever_is_said_of_a_chunk_counts() -> None:
    name, dtype, shape, chunk, content = CHUNK
    others = [
        ("model.norm.weights", dtype, shape, chunk, content),
        (name, "F16", shape, chunk, content),
        (name, dtype, (2, 3), chunk, content),
        (name, dtype, (6,), chunk, content),
        (name, dtype, shape, 1, content),
        (name, dtype, shape, chunk, hashlib.sha256(b"valuet").digest()),
    ]
    assert len({chunk_digest(*each) for each in (CHUNK, *others)}) == 7


@pytest.mark.parametrize(
    "change",
    [
        {"rope": RopeSpec(theta=10000.1)},
        {"rope": RopeSpec(kind="linear", factor=2.0)},
        {"rope": RopeSpec(interleaved=True)},
        {"local_rope": RopeSpec(theta=5000.0)},
        {"unrotated_layers": (1,)},
        {"attention_scale": 0.2},
        {"attention_softcap": 30.0},
        {"value_scale": 0.5},
        {"embedding_scale": 2.0},
        {"norm_eps": 2e-5},
        {"norm_offset": 1.0},
        {"activation": "gelu_tanh"},
        {"dtype": "float16"},
        {"qk_norm": "head"},
    ],
    ids=str,
)
def test_equal_weights_under_another_specification_are_another_model(change: dict[str, object]) -> None:
    spec, chunks = heads_model(2), [chunk_digest(*CHUNK)]
    assert spec.model_copy(update=change) != spec
    assert model_digest(spec.model_copy(update=change), chunks) != model_digest(spec, chunks)


def test_the_number_of_chunks_covers_every_byte() -> None:
    assert [num_chunks(size) for size in (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)] == [1, 1, 1, 2, 3]
