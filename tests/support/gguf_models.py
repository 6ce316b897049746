"""A model of transformers -> the GGUF file that llama.cpp's converter would make of it.

Names, types and the container are those of the package `gguf`. What the converter does to values is
written down here once more, from convert_hf_to_gguf.py: `permute`, and the one added to norms.
"""

from pathlib import Path
from typing import Any

import gguf
import gguf_latent
import gguf_linear
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from nanoserve.checkpoint.checkpoint import bundled_checkpoint

BUNDLED = bundled_checkpoint("tiny-qwen3")
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes with float16 numbers
ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "phi3": gguf.MODEL_ARCH.PHI3, "minicpm": gguf.MODEL_ARCH.MINICPM,
    "glm4": gguf.MODEL_ARCH.GLM4, "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2, "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3, "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen3next": gguf.MODEL_ARCH.QWEN3NEXT, "qwen35": gguf.MODEL_ARCH.QWEN35,
    "qwen35moe": gguf.MODEL_ARCH.QWEN35MOE,
}  # fmt: skip
_PERMUTED = ("llama", "minicpm", "granite", "smollm3")


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any bits, but for scales of which weights become small."""
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    for start in _SCALES[kind]:
        values = rng.uniform(2e-4, 4e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def encode(weight: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """float32 [rows, columns] as `kind`. `gguf` cannot quantize to K types: those are random."""
    if kind in _SCALES:
        return random_blocks(kind, *weight.shape, seed)
    return gguf.quants.quantize(weight, Kind[kind])


def decode(data: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(data, Kind[kind])


class ModelWriter:
    """Writes `model`, whose weights become what the file holds: it is the reference afterwards."""

    def __init__(self, model: PreTrainedModel, arch: str, kind: str) -> None:
        self.model, self.config, self.arch, self.kind = model, model.config, arch, kind
        self.names = gguf.get_tensor_name_map(ARCHS[arch], self.config.num_hidden_layers)
        self.seed = 0

    def write(
        self,
        path: Path,
        extra: dict[str, Any] | None = None,
        absolute: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`extra` are settings of the model, and numpy arrays for tensors; None leaves a setting
        out. `absolute` are others, by their whole names; `options` are the writer's."""
        writer = gguf.GGUFWriter(path, self.arch, **options)
        for name, value in (absolute or {}).items():
            add_setting(writer, name, value)
        settings = self.settings() | (extra or {})
        self.is_old = settings.keys() >= gguf_latent.OLD.keys()
        self.is_old = self.is_old and settings["attention.key_length_mla"] is None
        for name, value in settings.items():
            if isinstance(value, np.ndarray):
                writer.add_tensor(name, value)
            elif value is not None:
                add_setting(writer, f"{self.arch}.{name}", value)
        for name, parameter in self.model.named_parameters():
            self.add(writer, name, parameter.data)
        for name, buffer in self.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                self.add(writer, name.replace("n_bias", "n.bias"), buffer)
        close(writer)

    def settings(self) -> dict[str, Any]:
        config = self.config
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        found = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": getattr(config, "intermediate_size", None),
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.freq_base": float(rope["rope_theta"]),
            "vocab_size": config.vocab_size,
        }
        if self.arch in ("llama", "phi3", "granite", "smollm3", "glm4"):
            share = rope.get("partial_rotary_factor", 1.0)
            found["rope.dimension_count"] = int(head_dim * share)
        if self.arch.startswith("gemma") or self.arch == "gpt-oss":
            found["attention.sliding_window"] = config.sliding_window
        if self.arch == "gpt-oss":
            found["expert_feed_forward_length"] = config.intermediate_size
        if self.arch in ("qwen2moe", "qwen3moe"):
            found["expert_feed_forward_length"] = config.moe_intermediate_size
        if self.arch == "qwen2moe":
            size = config.shared_expert_intermediate_size
            found["expert_shared_feed_forward_length"] = size
        if self.arch == "deepseek2":
            found |= gguf_latent.settings(config)
        if self.arch in gguf_linear.ARCHS:
            found |= gguf_linear.settings(config, self.arch)
        return found

    def add(self, writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
        if name.endswith("sinks"):
            theirs = self.names.get_name(name)
            return writer.add_tensor(f"{theirs}.weight", weight.numpy(), raw_dtype=Kind.F32)
        if "experts." in name and self.arch == "gpt-oss":
            return self.add_stack(writer, name, weight)
        if ".experts." in name:
            return self.add_experts(writer, name, weight)
        if ".linear_attn." in name:
            return self.add_linear(writer, name, weight)
        if "kv_b_proj" in name and not self.is_old:
            for part, values in gguf_latent.halves(self.config, weight).items():
                self.add_matrices(writer, f"blk.{name.split('.')[2]}.{part}.weight", values)
            return None
        stem, _, suffix = name.rpartition(".")
        theirs = self.names.get_name(stem)
        assert theirs is not None, name
        stored, kind = self.stored(weight.squeeze(0))
        if self.arch in _PERMUTED and ".q_proj" in name:
            stored = permute(stored, self.config.num_attention_heads)
        if self.arch in _PERMUTED and ".k_proj" in name:
            stored = permute(stored, self.config.num_key_value_heads)
        has_ones = self.arch.startswith("gemma") or self.arch in gguf_linear.ARCHS
        if has_ones and name.endswith("norm.weight"):
            stored = stored + 1
        writer.add_tensor(f"{theirs}.{suffix}", stored, raw_dtype=Kind[kind])

    def add_experts(self, writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
        """transformers 5 has gate and up of all experts in one parameter, GGUF in two tensors."""
        layer = name.split(".")[2]
        parts = {"down": weight}
        if "gate_up" in name:
            size = weight.shape[1] // 2
            parts = {"gate": weight[:, :size], "up": weight[:, size:]}
        for part, values in parts.items():
            self.add_matrices(writer, f"blk.{layer}.ffn_{part}_exps.weight", values)

    def add_matrices(self, writer: gguf.GGUFWriter, name: str, values: torch.Tensor) -> None:
        flat = values.reshape(-1, values.shape[-1]).clone()
        stored, kind = self.stored(flat)
        values.copy_(flat.view(values.shape))
        stored = stored.reshape(*values.shape[:2], -1)
        writer.add_tensor(name, stored, raw_dtype=Kind[kind])

    def add_linear(self, writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
        layer, is_plain = name.split(".")[2], weight.ndim == 1 or "conv1d" in name
        parts = gguf_linear.tensors(self.config, self.arch, name, weight)
        for theirs, (rows, columns) in parts.items():
            rows = torch.arange(len(weight)) if rows is None else rows
            part = (weight.squeeze(1) if "conv1d" in name else weight)[rows]
            part = part if columns is None else part[:, columns]
            if is_plain:
                part = -part.exp() if theirs == "ssm_a" else part
                stored, kind = part.contiguous().numpy(), "F32"
            else:
                part = part.contiguous()
                stored, kind = self.stored(part)
                weight[rows] = part if columns is None else part[:, columns.argsort()]
            writer.add_tensor(f"blk.{layer}.{theirs}", stored, raw_dtype=Kind[kind])

    def add_stack(self, writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
        """gpt-oss's: matrices are transposed, and the outputs of gate and up alternate."""
        layer, kind = name.split(".")[2], "bias" if name.endswith("bias") else "weight"
        parts = {"down": weight}
        if "gate_up" in name:
            parts = {"gate": weight[..., ::2], "up": weight[..., 1::2]}
        for part, values in parts.items():
            stored, raw = values.contiguous().numpy(), "F32"
            if kind == "weight":
                flat = values.mT.reshape(-1, values.shape[1]).clone()
                stored, raw = self.stored(flat)
                values.copy_(flat.view(len(values), -1, values.shape[1]).mT)
                stored = stored.reshape(len(values), values.shape[2], -1)
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{kind}", stored, raw_dtype=Kind[raw])

    def stored(self, weight: torch.Tensor) -> tuple[np.ndarray, str]:
        """A matrix is quantized, and the model gets what it has become; all else stays float32."""
        if weight.ndim == 1:
            return weight.numpy(), "F32"
        self.seed += 1
        data = encode(weight.numpy(), self.kind, self.seed)
        weight.copy_(torch.from_numpy(decode(data, self.kind).copy()).view(weight.shape))
        return data, self.kind


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's: halves of a head become neighbours."""
    shape = weight.shape
    halves = weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(shape))


def add_setting(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bundled(
    path: Path,
    arch: str = "qwen3",
    pre: str = "qwen2",
    more: tuple[str, ...] = (),
    folder: Path = BUNDLED,
    **extra: Any,
) -> Path:
    """The bundled tokenizer, or another, as llama.cpp's converter writes one of byte-level BPE."""
    writer = gguf.GGUFWriter(path, arch)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    words += more
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    types = [gguf.TokenType.NORMAL] * len(words)
    for i, token in backend.get_added_tokens_decoder().items():
        types[i] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(words))
    special.merges = extra.pop("merges", special.merges)
    special.add_to_gguf(writer)
    for name, value in extra.items():
        add_setting(writer, f"tokenizer.ggml.{name}", value)
    if arch != "qwen3":
        add_setting(writer, f"{arch}.block_count", 1)
    close(writer)
    return path
