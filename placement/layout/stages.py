"""How the layers are cut into pipeline stages when nobody says: the largest stage as small as it can be.

A stage costs what it reads for a step of one token: the weights of its layers, and on the last stage the head. The
embedding is looked up, not read, so it costs no time; but the first stage must hold it. Hence, in this order:

1. the most that any stage reads is as small as possible;
2. what the stages read is as even as possible (least squares);
3. so is what they hold, the embedding counted with the first;
4. earlier stages get more.

With a head smaller than a layer the stages are within one layer of each other. SmolLM2-135M has 30 layers of 3.5M weights and
a head of 28M, the weight of eight layers::

    pp=2     19 layers │ 11 + head                      both read 19 layers' worth
    pp=4      9 │ 10 │ 9 │ 2 + head
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate

_Cost = tuple[int, int]
"""(sum of squares of what stages read, of what they hold)."""


@lru_cache(maxsize=256)
def partition_layers(layers: tuple[int, ...], stages: int, embedding: int, head: int) -> tuple[int, ...]:
    """Number of layers of each of `stages` stages; at least one each. Costs in weights; `layers` that of each layer."""
    starts = [0, *accumulate(layers)]
    limit = _least_maximum(starts, stages, head)

    def read(first: int, stop: int) -> int:
        return starts[stop] - starts[first] + (head if stop == len(layers) else 0)

    @cache
    def best(first: int, left: int) -> tuple[_Cost, tuple[int, ...]] | None:
        """The cheapest split of the layers from `first` on into `left` stages; None: none keeps within the limit."""
        found = None
        for stop in range(first + 1, len(layers) - left + 2) if left > 1 else [len(layers)]:
            reads = read(first, stop)
            if reads > limit:
                break
            rest = best(stop, left - 1) if left > 1 else ((0, 0), ())
            if rest is None:
                continue
            holds = reads + (embedding if first == 0 else 0)
            cost = (reads**2 + rest[0][0], holds**2 + rest[0][1])
            if found is None or cost <= found[0]:
                found = cost, (stop - first, *rest[1])
        return found

    chosen = best(0, stages)
    assert chosen is not None, f"{len(layers)} layers cannot fill {stages} stages"
    return chosen[1]


def _least_maximum(starts: list[int], stages: int, head: int) -> int:
    """The least that the largest of `stages` stages can read; `starts` are the running sums of the layers' costs."""
    ends = [*starts[:-1], starts[-1] + head]
    largest: dict[int, int] = {0: 0}
    for stage in range(stages):
        left = stages - stage - 1
        stops = range(stage + 1, len(starts) - left)
        largest = {
            stop: min(max(so_far, ends[stop] - starts[first]) for first, so_far in largest.items() if first < stop)
            for stop in stops
        }
    return largest[len(starts) - 1]
