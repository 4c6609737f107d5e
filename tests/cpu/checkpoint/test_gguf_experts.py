"""GGUF files of models with experts: three stacks a layer, of which a rank reads its columns of every expert."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from placement.checkpoint import header
from placement.layout.layout import Layout
from tests.support.models.checkpoint_checks import load_rank
from tests.support.models.tiny_models import TinyModel, tiny

ARCHITECTURES = {"mixtral": gguf.MODEL_ARCH.LLAMA, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE}
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}


def wide(family: str) -> TinyModel:
    """Rows of whole blocks of 32, and experts in every layer."""
    own = {"intermediate_size": 96} if family == "mixtral" else {"moe_intermediate_size": 96, "decoder_sparse_step": 1}
    return tiny(family, **WIDE, **own)


def write(path: Path, model: TinyModel, kind: str) -> dict[str, torch.Tensor]:
    """As the converter does; returns what should be read back, by the names of `reference.state_dict`, as float32."""
    arch, spec, its_kind = ARCHITECTURES[model.spec.family], model.spec, GGMLQuantizationType[kind]
    names, writer = gguf.get_tensor_name_map(arch, spec.num_layers), GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_expert_count(spec.moe.num_experts)
    writer.add_expert_used_count(spec.moe.top_k)
    if spec.family != "mixtral":
        writer.add_expert_feed_forward_length(spec.moe.expert_size)
    expected = {}
    for name, x in model.reference.state_dict().items():
        plain = x.dim() == 1 or ".gate." in name
        data = x.numpy() if plain else gguf.quantize(x.numpy(), its_kind)
        read = x if plain else torch.from_numpy(np.array(gguf.dequantize(data, its_kind)))
        expected[name] = read
        raw = GGMLQuantizationType.F32 if plain else its_kind
        if name.endswith("gate_up_proj"):
            half = data.shape[1] // 2
            for part, rows in (("gate", data[:, :half]), ("up", data[:, half:])):
                stored = names.get_name(name.replace("gate_up_proj", f"{part}_proj"))
                writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(rows), raw_dtype=raw)
            continue
        module = name.removesuffix(".weight")
        for projection, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
            if spec.family == "mixtral" and projection in name:
                data = np.ascontiguousarray(data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape))
        writer.add_tensor(f"{names.get_name(module)}.weight", data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_rank_holds_what_the_same_weights_in_a_folder_would_give_it(family: str, kind: str, tmp_path: Path) -> None:
    model = wide(family)
    expected = write(tmp_path / "m.gguf", model, kind)
    (tmp_path / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    save_file({name: x.contiguous() for name, x in expected.items()}, tmp_path / "model.safetensors")
    folder, file = header.read(tmp_path), header.read(tmp_path / "m.gguf")
    assert file.moe == folder.moe.model_copy(update={"form": "stacked"})
    for layout in (Layout(), Layout(tp=2), Layout(tp=3, pp=2)):
        for rank in range(layout.world):
            one, other = load_rank(tmp_path, folder, layout, rank), load_rank(tmp_path / "m.gguf", file, layout, rank)
            assert one.keys() == other.keys()
            for name in one:
                torch.testing.assert_close(other[name], one[name], atol=1e-6, rtol=0, msg=name)
