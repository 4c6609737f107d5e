"""Our router against the router of every family in transformers, and what it promises beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from actors.model.moe.router import Router
from placement.model.moe_spec import MoESpec

torch.set_num_threads(1)

HIDDEN, EXPERTS = 32, 12
DEEPSEEK = {"hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
GROUPS = {"n_group": 4, "topk_group": 2}
OURS = {"groups": 4, "top_groups": 2, "routed_scaling": 2.5}
V3 = {"scoring": "sigmoid", "choice_bias": True, "group_score": "best_two"}

KINDS: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "mixtral": (
        MixtralTopKRouter(MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=3)),
        {"normalise": True},
    ),
    "qwen": (Qwen2MoeTopKRouter(Qwen2MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=3)), {}),
    "gpt_oss": (
        GptOssTopKRouter(GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=3)),
        {"normalise": True, "router_bias": True},
    ),
    "deepseek_v2": (DeepseekV2TopkRouter(DeepseekV2Config(**DEEPSEEK)), {"routed_scaling": 2.5}),
    "deepseek_v2_groups": (
        DeepseekV2TopkRouter(DeepseekV2Config(**DEEPSEEK, **GROUPS, topk_method="group_limited_greedy")),
        OURS,
    ),
    "deepseek_v3": (DeepseekV3TopkRouter(DeepseekV3Config(**DEEPSEEK, **GROUPS)), {**OURS, **V3, "normalise": True}),
    "deepseek_v3_bare": (
        DeepseekV3TopkRouter(DeepseekV3Config(**DEEPSEEK, **GROUPS, norm_topk_prob=False)),
        {**OURS, **V3},
    ),
    "glm4": (
        Glm4MoeTopkRouter(Glm4MoeConfig(**DEEPSEEK, n_group=3, topk_group=2)),
        {**V3, "normalise": True, "groups": 3, "top_groups": 2, "routed_scaling": 2.5},
    ),
}


def parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach().clone(), requires_grad=False)


@pytest.mark.parametrize("kind", KINDS)
def test_choice_and_weights_are_those_of_the_family(kind: str) -> None:
    theirs, fields = KINDS[kind]
    torch.manual_seed(2)
    for tensor in theirs.state_dict().values():
        tensor.normal_()
    moe = MoESpec(num_experts=EXPERTS, top_k=3, expert_size=8, layers=(0,), **fields)
    biases = (parameter(getattr(theirs, "bias", None)), parameter(getattr(theirs, "e_score_correction_bias", None)))
    x = torch.randn(200, HIDDEN)
    weights, experts = Router(moe, parameter(theirs.weight), *biases)(x)
    with torch.no_grad():
        _, right_weights, right_experts = theirs(x)
    right, order = right_experts.sort(-1)
    assert torch.equal(experts, right)
    torch.testing.assert_close(weights, right_weights.gather(1, order), atol=1e-6, rtol=1e-5)


def router(**fields: Any) -> Router:
    weight = torch.zeros(fields["num_experts"], 4)
    biases = torch.zeros(fields["num_experts"]) if fields.get("choice_bias") else None
    return Router(MoESpec(expert_size=8, layers=(0,), **fields), parameter(weight), None, parameter(biases))


def test_equal_scores_go_to_the_lowest_ids() -> None:
    _, experts = router(num_experts=96, top_k=5)(torch.randn(64, 4))
    assert experts.tolist() == [[0, 1, 2, 3, 4]] * 64
    grouped = router(
        num_experts=96, top_k=5, groups=8, top_groups=3, choice_bias=True, scoring="sigmoid", group_score="best_two"
    )
    assert grouped(torch.randn(64, 4))[1].tolist() == [[0, 1, 2, 3, 4]] * 64


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    made = router(num_experts=16, top_k=4)
    made.weight.normal_()
    x = torch.randn(23, 4)
    weights, experts = made(x)
    for at in range(23):
        alone = made(x[at : at + 1])
        assert torch.equal(alone[0][0], weights[at])
        assert torch.equal(alone[1][0], experts[at])


def test_a_bf16_token_is_scored_in_fp32() -> None:
    made = router(num_experts=2, top_k=1)
    made.weight.copy_(torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0 + 2**-12, 0.0, 0.0]]))
    assert made(torch.ones(1, 4, dtype=torch.bfloat16))[1].item() == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 9}, "top_k=9 is more than num_experts=8"),
        ({"groups": 3}, "num_experts=8 is not a multiple of groups=3"),
        ({"groups": 2, "top_groups": 4}, "top_groups=4 is more than groups=2"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k=3 is more than the experts of top_groups=1 groups of 2"),
        ({"groups": 8, "top_groups": 8, "group_score": "best_two"}, "one expert a group"),
    ],
)
def test_numbers_that_clash_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoESpec(**{"num_experts": 8, "top_k": 2, "expert_size": 4, "layers": (0,), **fields})
