"""GGUF tensor names and the Hugging Face names they stand for."""

from __future__ import annotations

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor: ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``.

    A name that is not known is returned as it is.
    """
    match name.split("."):
        case [module, leaf] if module in _OUTER:
            return f"{_OUTER[module]}.{leaf}"
        case ["blk", layer, module, leaf] if module in _LAYER:
            return f"model.layers.{layer}.{_LAYER[module]}.{leaf}"
    return name
