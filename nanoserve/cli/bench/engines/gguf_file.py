"""Convert a Qwen3 checkpoint in safetensors to GGUF for llama.cpp, without a tokenizer.

The file has only what a benchmark needs, i.e. the stored weights and the numbers of `config.json`.
The conversion uses the package `gguf` and numpy.
"""

import json
from pathlib import Path

import gguf
from gguf.quants import quantize

from .stored_tensors import as_float32, read_tensors


def write_gguf(checkpoint: Path, target: Path, kind: str | None = None) -> None:
    """Write the file `target`, with matrices quantized to `kind`: Q8_0, Q4_0, ... of `gguf`.

    Raises `ValueError` for a model other than Qwen3, and for weights that are quantized.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["architectures"] != ["Qwen3ForCausalLM"]:
        raise ValueError(f"llama.cpp is measured with Qwen3 only, not {config['architectures']}")
    writer = gguf.GGUFWriter(target, "qwen3")
    _add_settings(writer, config)
    num_layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    for name, dtype, data in read_tensors(checkpoint):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ValueError(f"GGUF has no tensor {name} for Qwen3")
        if data.ndim == 1:  # norms: llama.cpp needs them in float32
            writer.add_tensor(theirs, as_float32(data))
        elif kind is not None:
            stored = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(theirs, quantize(as_float32(data), stored), raw_dtype=stored)
        else:
            writer.add_tensor(theirs, data, raw_dtype=gguf.GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or rope["rope_theta"]
    if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ValueError("RoPE scaling is not supported in the conversion to GGUF")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
