"""Requests of every kind for the tiny models: greedy and seeded, with filters, penalties, stops, some with shared prefixes."""

from __future__ import annotations

import random

from actors.wire.requests import GenerateRequest, SamplingParams


def random_requests(count: int, seed: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(101) for _ in range(24)]
    made = []
    for number in range(count):
        prompt = shared[: rng.choice([0, 0, 8, 24])] + [rng.randrange(101) for _ in range(rng.randint(1, 30))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            seed=number,
            stop_token_ids=tuple(rng.sample(range(101), rng.choice([0, 3]))),
            min_tokens=rng.choice([0, 4]),
            logprobs=0,
        )
        made.append(
            GenerateRequest(
                request_id=f"r{number}",
                prompt=prompt,
                max_tokens=rng.randint(1, 30),
                sampling=sampling,
                priority=rng.choice([0, 0, 1]),
                tenant=rng.choice(["a", "b"]),
                cache_salt=rng.choice(["", "salt"]),
            )
        )
    return made
