"""Parameters of multi-head latent attention (MLA, `placement.model.mla_spec`) on one rank.

The projections to latents are replicated on every rank of a tp group; the projections from latents to heads are split by heads.
Any number of heads per rank is legal::

    qkv_a      [q_lora_rank + latent_dim, hidden]       replicated  (without q_lora_rank: own heads' queries, then the latent)
    q_a_norm, kv_a_norm                                 replicated
    q_b        [own heads * query_dim, q_lora_rank]
    kv_b       [own heads * (nope + value), kv_lora_rank]
    o          [hidden, own heads * value_dim]
"""

from __future__ import annotations

from collections.abc import Iterator

from placement.model.mla_spec import MLASpec
from placement.model.spec import ModelSpec
from placement.ownership.weight_slices import Parameter, Segment, inputs, of_heads, rows, whole


def latent_attention(spec: ModelSpec, mla: MLASpec, q_heads: range, here: str, there: str) -> Iterator[Parameter]:
    """Yields the MLA parameters of one layer on a rank with the query heads `q_heads`, in the order of use. `here` is the
    prefix of the parameters' names on the rank, `there` that of the tensors' names in the checkpoint
    (``model.layers.3.self_attn``)."""
    hidden, rank, latent = spec.hidden_size, mla.q_lora_rank, mla.latent_dim
    queries: Segment = (f"{there}.q_proj.weight", spec.num_heads * mla.query_dim, of_heads(q_heads, mla.query_dim))
    first = queries if rank is None else (f"{there}.q_a_proj.weight", rank, range(rank))
    yield rows(f"{here}.qkv_a.weight", hidden, first, (f"{there}.kv_a_proj_with_mqa.weight", latent, range(latent)))
    if spec.qkv_bias:
        bias = ("", 0, first[2]) if rank is None else (f"{there}.q_a_proj.bias", rank, range(rank))  # q_proj has none: zeros
        yield rows(f"{here}.qkv_a.bias", None, bias, (f"{there}.kv_a_proj_with_mqa.bias", latent, range(latent)))
    if rank is not None:
        yield whole(f"{here}.q_a_norm.weight", f"{there}.q_a_layernorm.weight", rank)
        yield rows(f"{here}.q_b.weight", rank, (f"{there}.q_b_proj.weight", *queries[1:]))
    yield whole(f"{here}.kv_a_norm.weight", f"{there}.kv_a_layernorm.weight", mla.kv_lora_rank)
    made = mla.nope_dim + mla.value_dim
    kv_b = (f"{there}.kv_b_proj.weight", spec.num_heads * made, of_heads(q_heads, made))
    yield rows(f"{here}.kv_b.weight", mla.kv_lora_rank, kv_b)
    width = spec.num_heads * mla.value_dim
    yield inputs(f"{here}.o.weight", f"{there}.o_proj.weight", hidden, width, of_heads(q_heads, mla.value_dim))
    if spec.o_bias:
        yield whole(f"{here}.o.bias", f"{there}.o_proj.bias", hidden)


def head_elements(spec: ModelSpec, mla: MLASpec) -> int:
    """Returns the number of weights of one query head in one MLA layer: those that are split over the tp ranks, not
    replicated."""
    made = mla.kv_lora_rank * (mla.nope_dim + mla.value_dim)
    return mla.query_dim * (mla.q_lora_rank or spec.hidden_size) + made + mla.value_dim * spec.hidden_size
