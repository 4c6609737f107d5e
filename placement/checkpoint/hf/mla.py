"""Multi-head latent attention (MLA) from ``config.json``: the fields of DeepSeek-V2 and DeepSeek-V3."""

from __future__ import annotations

import math

from placement.checkpoint.directory.header_fields import HeaderFields, made
from placement.checkpoint.hf.families import Family
from placement.model.mla_spec import MLASpec
from placement.model.spec import RopeSpec

_NAMES = {"nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}


def read_mla(config: HeaderFields, family: Family, num_heads: int) -> MLASpec | None:
    """Returns the sizes of multi-head latent attention (MLA); None for a family without it.

    `config` has the fields of config.json, `family` the defaults of its architecture, `num_heads` is the number of query heads.
    With MLA, a ``head_dim`` in the file is ignored. Raises `ModelError` if a size has the wrong type or is not positive, or if
    the file gives another number of KV heads than `num_heads`.
    """
    if not family.mla:
        return None
    if config.whole("num_key_value_heads", num_heads) != num_heads:
        raise config.fault("num_key_value_heads", f"latent attention makes a key for each of the {num_heads} query heads")
    return made(
        MLASpec,
        config.file,
        _NAMES,
        q_lora_rank=config.whole("q_lora_rank", None if "q_lora_rank" in config.values else 1536),
        kv_lora_rank=config.whole("kv_lora_rank", 512),
        nope_dim=config.whole("qk_nope_head_dim", 128),
        rope_dim=config.whole("qk_rope_head_dim", 64),
        value_dim=config.whole("v_head_dim", 128),
    )


def scores_scale(mla: MLASpec, rope: RopeSpec) -> float:
    """Returns the factor applied to MLA attention scores: ``query_dim ** -0.5``, times the square of YaRN's mscale over all
    dimensions.

    `rope` has the scaling of the model's RoPE. The absorbed form of MLA uses the same factor, although its queries are longer.
    """
    mscale = 1 + 0.1 * (rope.mscale_all_dim or 0.0) * math.log(rope.factor) if rope.factor > 1 else 1.0
    return float(mla.query_dim**-0.5 * mscale**2)
