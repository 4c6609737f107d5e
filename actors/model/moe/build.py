"""Builds the MoE block of one layer from the parameters of the shard table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from actors.model.layers.layers import ACTIVATIONS
from actors.model.moe.block import GatedSharedExpert, MixtureOfExperts, MixtureWithShared, SharedExpert
from actors.model.moe.experts import Experts, Gated, clamped_swiglu, gated_by
from actors.model.moe.layer_expert_map import LayerExpertMap
from actors.model.moe.router import Router
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard


def mixture(spec: ModelSpec, moe: MoESpec, own: Shard, table: Mapping[str, nn.Parameter], at: str) -> MixtureOfExperts:
    """Return the MoE block whose weights have the prefix `at` in `table`, the parameters by name (`KeyError` if one is
    missing). `own` is this rank's shard, which has the expert map.

    A bias without a row in `table` is one that the model, or this rank, does not have.
    """
    assert own.expert_map is not None
    gated = gated_by(ACTIVATIONS[spec.activation])
    routed = gated if moe.swiglu_limit is None else clamped_swiglu(moe.swiglu_limit, moe.swiglu_alpha)
    router = Router(moe, table[f"{at}.router.weight"], table.get(f"{at}.router.bias"), table.get(f"{at}.router.choice_bias"))
    experts = Experts(
        table[f"{at}.experts.gate_up"],
        table[f"{at}.experts.down"],
        routed,
        table.get(f"{at}.experts.gate_up_bias"),
        table.get(f"{at}.experts.down_bias"),
    )
    expert_map = LayerExpertMap(own.expert_map.experts[0], own.expert_slots, router.weight.device)
    parts = (router, experts, expert_map)
    return MixtureWithShared(*parts, _shared(table, f"{at}.shared", gated)) if moe.shared_size else MixtureOfExperts(*parts)


def _shared(table: Mapping[str, nn.Parameter], at: str, gated: Gated) -> SharedExpert:
    parts = (table[f"{at}.gate_up"], table[f"{at}.down"], gated)
    gate = table.get(f"{at}.gate")
    return SharedExpert(*parts) if gate is None else GatedSharedExpert(*parts, gate)
