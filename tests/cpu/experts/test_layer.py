"""The experts of a rank: sums over whatever tokens and experts they are given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.model.kernels.grouped import grouped_linear
from actors.model.moe.experts import Experts, clamped_swiglu, gated_by

torch.set_num_threads(1)

SLOTS, HIDDEN, COLUMNS, TOP_K = 5, 12, 7, 3


def experts(slots: int = SLOTS, columns: int = COLUMNS, biases: bool = False) -> Experts:
    torch.manual_seed(0)
    parts = [nn.Parameter(torch.randn(shape)) for shape in ((slots, 2 * columns, HIDDEN), (slots, HIDDEN, columns))]
    extra = [nn.Parameter(torch.randn(shape)) for shape in ((slots, 2 * columns), (slots, HIDDEN))] if biases else []
    return Experts(*parts, gated_by(F.silu), *extra).requires_grad_(False)


def one_by_one(held: Experts, x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, slot in zip(weights[token], slots[token].tolist(), strict=True):
            if slot < held.absent:
                gate_up = held.gate_up[slot] @ x[token] + (0 if held.gate_up_bias is None else held.gate_up_bias[slot])
                gate, up = gate_up.chunk(2)
                down = held.down[slot] @ (F.silu(gate) * up)
                out[token] += weight * (down + (0 if held.down_bias is None else held.down_bias[slot]))
    return out


def chosen(tokens: int, slots: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(slots)[:TOP_K] for _ in range(tokens)]) if tokens else torch.zeros(0, TOP_K, dtype=int)
    return torch.rand(tokens, TOP_K), ids


@pytest.mark.parametrize("tokens", [0, 1, 2, 40])
@pytest.mark.parametrize("biases", [False, True])
def test_a_token_is_the_weighted_sum_of_its_experts(tokens: int, biases: bool) -> None:
    held, x = experts(biases=biases), torch.randn(tokens, HIDDEN)
    weights, slots = chosen(tokens, SLOTS)
    torch.testing.assert_close(held(x, weights, slots), one_by_one(held, x, weights, slots), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_experts_elsewhere_add_nothing(tokens: int) -> None:
    held, x = experts(biases=True), torch.randn(tokens, HIDDEN)
    weights, slots = chosen(tokens, SLOTS + 4)
    slots = slots.clamp_max(held.absent)
    torch.testing.assert_close(held(x, weights, slots), one_by_one(held, x, weights, slots), atol=1e-5, rtol=1e-5)
    nowhere = torch.full_like(slots, held.absent)
    assert torch.equal(held(x, weights, nowhere), torch.zeros_like(x))


def test_all_tokens_to_one_expert() -> None:
    held, x = experts(), torch.randn(9, HIDDEN)
    weights, slots = torch.rand(9, 1), torch.full((9, 1), 3)
    torch.testing.assert_close(held(x, weights, slots), one_by_one(held, x, weights, slots), atol=1e-5, rtol=1e-5)


def test_a_token_has_the_same_bits_whoever_its_neighbours_are() -> None:
    held, x = experts(), torch.randn(31, HIDDEN)
    weights, slots = chosen(31, SLOTS)
    together = held(x, weights, slots)
    for at in range(31):
        here = slice(at, at + 1)
        assert torch.equal(held(x[here], weights[here], slots[here]), together[here])


def test_one_tokens_infinity_does_not_reach_another() -> None:
    held, x = experts(), torch.randn(3, HIDDEN)
    weights, slots = chosen(3, SLOTS)
    slots[2] = held.absent
    right = held(x, weights, slots)
    x[1] = torch.inf
    assert torch.equal(held(x, weights, slots)[[0, 2]], right[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_each_rows_own(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 6).to(dtype), torch.randn(4, 5, 6).to(dtype)
    found = grouped_linear(x, weight, torch.tensor([3, 3, 5, 9]))
    right = torch.cat([x[:3] @ weight[0].T, x[3:5] @ weight[2].T, x[5:] @ weight[3].T])
    torch.testing.assert_close(found, right)


def test_the_clamped_swiglu_is_gpt_osss() -> None:
    gate, up = torch.randn(50) * 6, torch.randn(50) * 6
    found = clamped_swiglu(3.0, 1.702)(gate.clone(), up.clone())
    gate, up = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
    torch.testing.assert_close(found, (up + 1) * gate * torch.sigmoid(1.702 * gate))
