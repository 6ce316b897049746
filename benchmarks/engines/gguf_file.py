"""A Qwen3 checkpoint in safetensors -> the GGUF file that llama.cpp reads, without a tokenizer.

Only what a benchmark needs: the weights as they are stored, and the numbers of `config.json`. It
uses the package `gguf` and numpy; the safetensors format is simple enough to be read here: eight
bytes with the length of a JSON header, the header, and the tensors one after the other.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

_STORED = {
    "BF16": (np.uint16, gguf.GGMLQuantizationType.BF16),
    "F16": (np.float16, gguf.GGMLQuantizationType.F16),
    "F32": (np.float32, gguf.GGMLQuantizationType.F32),
}


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Raises `ValueError` for a model that is no Qwen3, and for weights that are quantised."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["architectures"] != ["Qwen3ForCausalLM"]:
        raise ValueError(f"llama.cpp is measured with Qwen3 only, not {config['architectures']}")
    writer = gguf.GGUFWriter(target, "qwen3")
    _add_settings(writer, config)
    num_layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    for name, dtype, data in _read_tensors(checkpoint):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        stored, kind = _STORED[dtype]
        data = data.view(stored)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ValueError(f"GGUF knows no tensor {name} in a Qwen3")
        if data.ndim == 1:  # norms: llama.cpp wants them in float32
            writer.add_tensor(theirs, _as_float32(data))
        else:
            writer.add_tensor(theirs, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or rope["rope_theta"]
    if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ValueError("rope scaling is not written to GGUF")
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


def _read_tensors(checkpoint: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, dtype and bytes of every tensor: [..., last dimension x bytes per value] uint8."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        content = np.memmap(file, dtype=np.uint8, mode="r")
        length = int(content[:8].view(np.uint64)[0])
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _STORED:
                raise ValueError(f"{name} in {file} is stored as {entry['dtype']}")
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, entry["dtype"], content[start:end].reshape(*entry["shape"][:-1], -1)


def _as_float32(data: np.ndarray) -> np.ndarray:
    if data.dtype == np.uint16:  # bfloat16: the upper half of a float32
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
