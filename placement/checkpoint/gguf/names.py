"""GGUF tensor names and the Hugging Face names they stand for."""

from __future__ import annotations

from placement.model.spec import ModelSpec
from placement.ownership.shards import NORMS

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORM_PLACES = {
    "attn_norm": "input_norm",
    "post_attention_norm": "attn_out_norm",
    "ffn_norm": "post_norm",
    "post_ffw_norm": "mlp_out_norm",
}
"""GGUF norm names, each with its place in the layer; `placement.ownership.shards.NORMS` has the places, too."""


def hugging_face_name(name: str, spec: ModelSpec) -> str:
    """Returns the Hugging Face name of a GGUF tensor: ``model.layers.3.self_attn.q_proj.weight`` for ``blk.3.attn_q.weight``.

    `spec` decides the names of norms and of a fused gate and up projection. An unknown name is returned unchanged.
    """
    match name.split("."):
        case [module, leaf] if module in _OUTER:
            return f"{_OUTER[module]}.{leaf}"
        case ["blk", layer, module, leaf]:
            found = _in_layer(module, spec)
            return name if found is None else f"model.layers.{layer}.{found}.{leaf}"
    return name


def _in_layer(module: str, spec: ModelSpec) -> str | None:
    if module == "ffn_up" and spec.fused_gate_up:
        return "mlp.gate_up_proj"
    if module in _NORM_PLACES:
        return NORMS[spec.norms].get(_NORM_PLACES[module])
    return _LAYER.get(module)
