"""Pipeline stages (pipeline parallelism, PP): the default partition of layers, which minimises the largest stage.

The cost of a stage is the number of weights it reads for a step of one token: those of its layers, and on the last stage those
of the LM head. The embedding is looked up, not read, so it costs no time, but the first stage must hold it. The criteria are,
in this order:

1. the maximum of what any stage reads is as small as possible;
2. what the stages read is as even as possible (least squares);
3. what the stages hold, including the embedding, is as even as possible (least squares);
4. earlier stages get more layers.

If the head is smaller than a layer, the stages differ by at most one layer. SmolLM2-135M has 30 layers of 3.5M weights and a
head of 28M weights, as many as eight layers::

    pp=2     19 layers │ 11 + head                      both read the equivalent of 19 layers
    pp=4      9 │ 10 │ 9 │ 2 + head
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate

_Cost = tuple[int, int]
"""Pair of sums of squares: of the weights that the stages read, and of the weights that they hold."""


@lru_cache(maxsize=256)
def partition_layers(layers: tuple[int, ...], stages: int, embedding: int, head: int) -> tuple[int, ...]:
    """Returns the number of layers of each of `stages` pipeline stages, at least one each, such that the largest stage is
    minimal.

    `layers` has the number of weights of each layer, `embedding` and `head` those of the embedding (held by the first stage)
    and the LM head (read by the last). There must be at least as many layers as stages.
    """
    starts = [0, *accumulate(layers)]
    limit = _least_maximum(starts, stages, head)

    def read(first: int, stop: int) -> int:
        return starts[stop] - starts[first] + (head if stop == len(layers) else 0)

    @cache
    def best(first: int, left: int) -> tuple[_Cost, tuple[int, ...]] | None:
        """Returns the cheapest split of the layers from `first` on into `left` stages; None if none stays within the limit."""
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
    """Returns the smallest possible maximum of what a stage reads; `starts` are the running sums of the layers' costs."""
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
