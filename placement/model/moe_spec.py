"""What a mixture of experts is: which layers have how many, how a token's are chosen and weighted, and what an expert does."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from placement.model.bounds import Positive, PositiveInt

ExpertTensorFormat = Literal["each", "mixtral", "fused", "gpt_oss", "stacked"]
"""How a checkpoint holds the experts of a layer: see `placement.ownership.expert_slices`."""


class MoESpec(BaseModel):
    """The facts of a model's layers with experts; all of them are alike. Sizes are global (before any split).

    A token's experts are the `top_k` of largest score (the lowest id among equals)::

        logits ─scoring─→ scores ──+ bias, best groups only──→ top k        the choice
                            └─────────────────────────── of these: normalised, times routed_scaling     the weights

    Softmax over the logits of the chosen experts alone (gpt-oss) is softmax over all, normalised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: PositiveInt
    top_k: PositiveInt
    """Experts of a token, shared ones not counted."""
    expert_size: PositiveInt
    """Columns of one expert."""
    layers: tuple[int, ...]
    """Layers that have experts; the others are dense."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False
    """The weights of a token are made to add up to 1."""
    choice_bias: bool = False
    """A bias is added to the scores for the choice; the weights do not see it (DeepSeek-V3)."""
    groups: PositiveInt = 1
    """Experts are in this many groups, of which a token can choose from the `top_groups` best."""
    top_groups: PositiveInt = 1
    group_score: Literal["best", "best_two"] = "best"
    """What a group is worth: its best score, or its two best together."""
    routed_scaling: Positive = 1.0
    """The weights are multiplied by this at last."""
    shared_size: Annotated[int, Field(ge=0)] = 0
    """Columns of the expert that every token goes through besides; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product with the token (Qwen2-MoE)."""
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: Positive | None = None
    """An expert is ``down((clamp(up) + 1) * gate * sigmoid(alpha * gate))`` with gate and up held to this (gpt-oss)."""
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
        """Experts of one group."""
        return self.num_experts // self.groups
