"""Mixture of experts (MoE): which layers have experts, how the router scores and selects them, and what an expert computes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from placement.model.bounds import Positive, PositiveInt

ExpertTensorFormat = Literal["each", "mixtral", "fused", "gpt_oss", "stacked"]
"""Form in which a checkpoint stores the experts of a layer: see `placement.ownership.expert_slices`."""


class MoESpec(BaseModel):
    """Sizes and routing rules of a model's MoE layers, which are all alike. Sizes are global (before any split).

    A token is routed to the `top_k` experts of the largest score (the lowest id among equals)::

        logits ─scoring─→ scores ──+ bias, best groups only──→ top k        the selection
                            └────────── of the selected: normalised, times routed_scaling     the weights

    Softmax over the logits of the selected experts alone (gpt-oss) equals softmax over all experts, normalised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: PositiveInt
    top_k: PositiveInt
    """Number of routed experts per token; shared experts are not counted."""
    expert_size: PositiveInt
    """Intermediate size (columns) of one expert."""
    layers: tuple[int, ...]
    """Indices of the MoE layers; the other layers are dense."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False
    """Whether the weights of a token are normalised to sum to 1."""
    choice_bias: bool = False
    """Whether a bias is added to the scores for the selection only, not for the weights (DeepSeek-V3)."""
    groups: PositiveInt = 1
    """Number of expert groups; a token selects its experts from the `top_groups` best groups."""
    top_groups: PositiveInt = 1
    group_score: Literal["best", "best_two"] = "best"
    """Score of a group: its best expert score, or the sum of its two best."""
    routed_scaling: Positive = 1.0
    """Factor applied to the weights last."""
    shared_size: Annotated[int, Field(ge=0)] = 0
    """Intermediate size (columns) of the shared expert that processes every token; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a linear gate of the token (Qwen2-MoE)."""
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: Positive | None = None
    """If set, an expert is ``down((clamp(up) + 1) * gate * sigmoid(alpha * gate))``, with gate and up clamped to this limit
    (gpt-oss). None: an ordinary gated MLP."""
    swiglu_alpha: Positive = 1.702
    form: ExpertTensorFormat = "each"

    @model_validator(mode="after")
    def _numbers_agree(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.num_experts % self.groups:
            raise ValueError(f"num_experts={self.num_experts} is not a multiple of groups={self.groups}")
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups={self.top_groups} is more than groups={self.groups}")
        if self.top_k > self.top_groups * self.group_size:
            raise ValueError(
                f"top_k={self.top_k} is more than the experts of top_groups={self.top_groups} groups of {self.group_size}"
            )
        if self.groups > 1 and self.group_score == "best_two" and self.group_size < 2:
            raise ValueError(f"groups={self.groups} leaves one expert a group, but its two best are to be added up")
        return self

    @property
    def group_size(self) -> int:
        """Number of experts in one expert group: ``num_experts / groups``."""
        return self.num_experts // self.groups
