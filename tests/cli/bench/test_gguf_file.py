"""cli/bench/engines/gguf_file.py: llama.cpp gets the same weights. Needs the package gguf."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tiny_checkpoints import edit_json, make_qwen3

gguf = pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")

from nanoserve.cli.bench.engines.gguf_file import write_gguf  # noqa: E402


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_holds_the_checkpoints_values(dtype: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path, dtype=dtype)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        assert len(found) == len(list(stored.keys()))
        pairs = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }
        pairs["model.layers.1.self_attn.k_norm.weight"] = "blk.1.attn_k_norm.weight"
        pairs["model.layers.0.mlp.down_proj.weight"] = "blk.0.ffn_down.weight"
        for ours, theirs in pairs.items():
            values, tensor = stored.get_tensor(ours), found[theirs]
            read = gguf.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(read.reshape(values.shape), values.float().numpy())
    assert reader.fields["qwen3.block_count"].contents() == 2
    assert reader.fields["qwen3.attention.head_count_kv"].contents() == 2


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match="measured with Qwen3 only"):
        write_gguf(tmp_path, tmp_path / "model.gguf")
