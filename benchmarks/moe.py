"""Measure the cost of a MoE layer by its token dispatch (all-gather or all-to-all), and what expert rebalancing makes of a
skewed router.

    python benchmarks/moe.py [--ranks 4] [--rounds 7] [--only modes|skew]

Ranks are processes over shared memory, with one thread each. The first part runs steps of 1 to 4,096 tokens in three modes:
tokens gathered to all ranks, tokens dispatched to the ranks of their experts, and, with all experts replicated on every rank,
tokens not sent at all. The modes take turns in every round. A step takes as long as its slowest rank; the table shows medians.
The second part uses a router that sends two fifths of all pairs to one expert. It shows balancedness, the wait for the slowest
rank and the time of a step, before and after the experts have moved.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from actors.engine.config.balancing import Balancing
from actors.engine.eplb import ExpertBalancer
from actors.groups.group import Group
from actors.groups.shared_memory.shared_memory import SharedMemoryGroup
from actors.groups.solo import SoloGroup
from actors.model.moe.block import MixtureOfExperts
from actors.model.moe.build import mixture
from actors.model.moe.dispatch_selection import ExchangesByRule
from actors.model.moe.expert_mover import ExpertWeightMover
from actors.model.step.regions import Regions
from actors.wire.plans import StepPlan
from placement.cost import expert_modes
from placement.experts.expert_map import balancedness, bound
from placement.layout.layout import Layout
from placement.layout.partition import partition
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.ownership.context import BLOCK_TOKENS
from placement.ownership.rank_identity import RankIdentity
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
MODES = ("gather", "a2a", "replicated")
SKEW, HOT = 0.4, 31
"""Fraction of all (token, expert) pairs that go to the hot expert, and the hot expert's number: the last one, so that it has no
redundant copy at first."""
SKEW_TOKENS, SKEW_LAYERS = 512, 2
_LAYER = "layers.{}.mlp"


def model(num_layers: int, **moe: Any) -> ModelSpec:
    """Returns a model of layers with 32 experts of 768 columns, 4 experts a token, and hidden size 1,024."""
    experts = {"num_experts": 32, "top_k": 4, "expert_size": 768, "layers": tuple(range(num_layers)), "normalise": True}
    return ModelSpec(
        family="qwen3_moe",
        hidden_size=1024,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=64,
        vocab_size=64,
        max_position=64,
        norm_eps=1e-6,
        windows=(None,) * num_layers,
        moe=MoESpec(**(experts | moe)),
    )


@dataclass
class LayerRank:
    """The MoE layers of one rank, without the rest of the model. The rank is a DP rank of its own, so its tokens are its
    own."""

    spec: ModelSpec
    layout: Layout
    rank: int
    copy: Group

    def __post_init__(self) -> None:
        identity = RankIdentity.of(self.spec, self.layout, self.rank, BLOCK_TOKENS)
        self.own: Shard = identity.shard
        table = {row.name: _filled(row.shape, row.fp32) for row in parameters(self.spec, self.own) if ".mlp." in row.name}
        assert self.spec.moe is not None
        self.mixtures: dict[int, MixtureOfExperts] = {
            layer: mixture(self.spec, self.spec.moe, self.own, table, _LAYER.format(layer)) for layer in self.spec.moe.layers
        }
        groups = {"tp": SoloGroup("tp"), "cp": SoloGroup("cp"), "moe": self.copy}
        self._exchanges = ExchangesByRule(self.spec, identity, groups, 4, torch.device("cpu"))
        self._regions = Regions(groups["tp"], None)

    @torch.inference_mode()
    def step(self, x: Tensor, new_lens_across_dp: Sequence[Sequence[int]], number: int = 0) -> None:
        """Run the tokens `x` `[own, hidden]` of this rank through the layers, as step `number`."""
        exchange = self._exchanges.of(new_lens_across_dp, number)
        region = self._regions.of(new_lens_across_dp[self.rank])
        for layer in self.mixtures.values():
            if len(x):
                exchange.through(layer, x, region)
            else:
                exchange.serve(layer, x)


def _filled(shape: tuple[int, ...], fp32: bool) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5, requires_grad=False)


def new_lens_of(tokens: int, ranks: int) -> list[list[int]]:
    """Returns the new lengths of a step with `tokens` decodes, split over the DP ranks."""
    return [[1] * len(part) for part in partition(tokens, ranks)]


def run_modes(rank: int, ranks: int, copy: Group, pipe: Connection, rounds: int) -> None:
    """Send the times of every round through the pipe, by mode and number of tokens."""
    texts = {name: f"attn_dp={ranks},ep={ranks},dispatch={name}" for name in MODES[:2]}
    texts["replicated"] = f"attn_dp={ranks},moe_dp={ranks}"
    subjects = {}
    for name, text in texts.items():
        torch.manual_seed(0)
        group = SoloGroup("moe") if name == "replicated" else copy
        subjects[name] = LayerRank(model(1), Layout.parse(text), rank, group)
    times: dict[tuple[str, int], list[float]] = {}
    for tokens in TOKENS:
        new_lens_across_dp = new_lens_of(tokens, ranks)
        x = torch.randn(len(new_lens_across_dp[rank]), 1024)
        for _ in range(rounds + 1):
            for name, subject in subjects.items():
                copy.barrier()
                began = time.perf_counter()
                subject.step(x, new_lens_across_dp)
                times.setdefault((name, tokens), []).append(time.perf_counter() - began)
    pipe.send({key: values[1:] for key, values in times.items()})


def skewed(spec: ModelSpec, layer: MixtureOfExperts) -> None:
    """Bias the router so that the hot expert gets `SKEW` of all pairs, for tokens as the benchmark draws them."""
    assert spec.moe is not None
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(8192, spec.hidden_size, generator=draw) @ layer.router.weight.T
    rest = logits[:, :HOT].topk(spec.moe.top_k, -1).values[:, -1]  # the hot expert is chosen if its logit exceeds this one
    bias = torch.quantile(rest - logits[:, HOT], SKEW * spec.moe.top_k)
    assert layer.router.bias is not None
    layer.router.bias.zero_()
    layer.router.bias[HOT] = bias


def run_skew(rank: int, ranks: int, copy: Group, pipe: Connection, rounds: int) -> None:
    """Run the steps of the plans that the pipe brings, with their expert moves and load reports, until it brings None."""
    spec, layout = model(SKEW_LAYERS, top_k=2, router_bias=True, normalise=False), skew_layout(ranks)
    torch.manual_seed(0)
    subject = LayerRank(spec, layout, rank, copy)
    for layer in subject.mixtures.values():
        skewed(spec, layer)
    placed = subject.own.expert_map
    assert placed is not None
    mover = ExpertWeightMover(subject.mixtures, copy, placed, layout.moe_tp, rank)
    new_lens_across_dp = new_lens_of(SKEW_TOKENS, ranks)
    draw = torch.Generator().manual_seed(2 + rank)
    while (plan := pipe.recv()) is not None:
        x = torch.randn(len(new_lens_across_dp[rank]), spec.hidden_size, generator=draw)
        copy.barrier()
        began = time.perf_counter()
        with torch.inference_mode():
            mover.move(plan.moves)
        subject.step(x, new_lens_across_dp, plan.step)
        pipe.send((time.perf_counter() - began, mover.report(plan.step) if plan.asks_experts else None))


def skew_layout(ranks: int) -> Layout:
    return Layout.parse(f"attn_dp={ranks},ep={ranks},redundant_experts={ranks}")


def balance(pipes: Sequence[Connection], ranks: int) -> tuple[Table, float]:
    """Run the balancer on a skewed router. Returns a table of the steps before and after its move, and the reached fraction of
    the bound."""
    spec, layout = model(SKEW_LAYERS, top_k=2, router_bias=True, normalise=False), skew_layout(ranks)
    config = Balancing.of(spec, layout, 4, rebalance_every=20, rebalance_skew=None)
    assert config is not None
    balancer = ExpertBalancer(config.model_copy(update={"ask_every": 10}))
    table = Table("steps", "balancedness", "of the bound", "wait for the slowest", "experts moved", "ms a step")
    seconds: list[float] = []
    reached = 0.0
    for step in range(160):
        plan = balancer.into(StepPlan(step=step, rows=[]))
        for pipe in pipes:
            pipe.send(plan)
        answers = [pipe.recv() for pipe in pipes]
        seconds.append(max(spent for spent, _ in answers))
        reports = [report for _, report in answers if report is not None]
        for report in reports:
            balancer.on_report(report)
        if reports and step + 1 in (10, 160):
            load = [
                [sum(one.layers[at].tokens[expert] for one in reports) for expert in range(32)] for at in range(SKEW_LAYERS)
            ]
            even, most = balancedness(balancer.map, load), bound(load, config.experts.slots)
            reached = statistics.mean(even) / statistics.mean(most)
            wait = _straggling(reports)
            cells = (f"{statistics.mean(even):.3f}", f"{reached:.1%}", f"{wait:.1%}")
            moved = str(balancer.stats().moved_experts)
            table.add_row(f"{step - 8} to {step + 1}", *cells, moved, f"{statistics.median(seconds[-10:]) * 1e3:.1f}")
    balancer.close()
    return table, reached


def _straggling(reports: Sequence[Any]) -> float:
    """Returns the mean fraction of the slowest rank's expert seconds that the other ranks spend waiting."""
    by_layer = zip(*([layer.expert_s for layer in report.layers] for report in reports), strict=True)
    slowest, used = 0.0, 0.0
    for seconds in by_layer:
        slowest += max(seconds)
        used += statistics.mean(seconds)
    return 1 - used / slowest


def rank_process(run: Callable[..., None], name: str, rank: int, ranks: int, pipe: Connection, rounds: int) -> None:
    """Run one rank of either part."""
    torch.set_num_threads(1)
    copy = SharedMemoryGroup.attach(name, rank, ranks, "moe")
    run(rank, ranks, copy, pipe, rounds)
    copy.close()


def started(run: Callable[..., None], ranks: int, rounds: int) -> tuple[list[Any], list[Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(ranks)]
    name = f"benchmark.moe.{os.getpid()}.{run.__name__}"
    processes = [
        context.Process(target=rank_process, args=(run, name, rank, ranks, pipes[rank][1], rounds), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes, [ours for ours, _ in pipes]


def show_modes(times: dict[tuple[str, int], list[float]], ranks: int) -> Table:
    """Returns a table of the milliseconds of a step by mode, with the mode that the dispatch rule chooses."""
    table = Table("tokens", *(f"{name}, ms" for name in MODES), "rule", "of the faster")
    for tokens in TOKENS:
        found = {name: statistics.median(times[name, tokens]) for name in MODES}
        chosen = expert_modes.mode(model(1), Layout.parse(f"attn_dp={ranks},ep={ranks}"), new_lens_of(tokens, ranks), 4)
        other = "a2a" if chosen == "gather" else "gather"
        ratio = statistics.median(a / b for a, b in zip(times[chosen, tokens], times[other, tokens], strict=True))
        table.add_row(str(tokens), *(f"{found[name] * 1e3:.2f}" for name in MODES), chosen, f"{max(1.0, ratio):.2f}")
    return table


def main() -> None:
    """Measure both parts and print their tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--only", choices=("modes", "skew"))
    chosen, console = options.parse_args(), Console(width=110)
    console.print(f"torch {torch.__version__}, {os.cpu_count()} cores, {chosen.ranks} ranks, load {os.getloadavg()[0]:.1f}")
    if chosen.only != "skew":
        processes, pipes = started(run_modes, chosen.ranks, chosen.rounds)
        of_ranks = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
        slowest = {
            key: [max(values) for values in zip(*(times[key] for times in of_ranks), strict=True)] for key in of_ranks[0]
        }
        console.print(show_modes(slowest, chosen.ranks))
    if chosen.only != "modes":
        processes, pipes = started(run_skew, chosen.ranks, chosen.rounds)
        table, _ = balance(pipes, chosen.ranks)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
        console.print(table)


if __name__ == "__main__":
    main()
