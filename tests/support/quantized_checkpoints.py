"""Quantized checkpoints of a tiny Qwen3, written from the published layouts of their formats.

Each writer takes a float32 weight [out, in] and returns what the format stores for it, by its name
in the module, and the float32 weight that this means: by the definition of the format, not by any
code of the package. Sources: GPTQ: `pack` in AutoGPTQ's `qlinear_cuda_old.py` and GPTQModel's
`convert_gptq_v2_to_v1_format_module`; AWQ: `WQLinear_GEMM.from_linear` of AutoAWQ; FP8:
`weight_dequant` in DeepSeek-V3's `kernel.py`; bitsandbytes: its `QuantState.as_dict` and QLoRA,
appendix E.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_qwen3
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole groups of 32


def make_quantized(path: Path, write: Writer, config: dict, **sizes: int) -> dict[str, Tensor]:
    """A checkpoint whose linears (not the LM head) `write` writes; returns the plain weights."""
    make_qwen3(path, **SIZES | sizes)
    stored, plain = {}, load_file(path / "model.safetensors")
    for name, weight in list(plain.items()):
        if "_proj.weight" not in name:
            stored[name] = weight
            continue
        parts, plain[name] = write(weight)
        stored |= {name.removesuffix("weight") + part: t.contiguous() for part, t in parts.items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", quantization_config=config)
    return plain


def split_into_shards(path: Path, num_files: int = 3) -> None:
    """The tensors go round, so the parts of one weight lie in several files."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for index in range(num_files):
        names = sorted(tensors)[index::num_files]
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def codes_of(weight: Tensor, bits: int, group: Tensor, seed: int = 0) -> tuple[Tensor, ...]:
    """Codes [out, in], zero points and float16 scales [out, groups], of groups [in].

    Zero points are random, with the least and the greatest among them; the codes are the nearest.
    """
    generator = torch.Generator().manual_seed(seed)
    out, groups, most = len(weight), int(group.max()) + 1, 2**bits - 1
    zeros = torch.randint(0, most + 1, (out, groups), generator=generator)
    zeros[0, 0], zeros[1, 0] = 0, most
    scales = torch.rand(out, groups, generator=generator) * 0.04 + 0.01
    scales = scales.half().float()
    codes = (weight / scales[:, group]).round() + zeros[:, group]
    return codes.clamp(0, most).long(), zeros, scales


def pack_words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, m x bits / 32]: value `order[i]` of a word is its i-th from below."""
    per_word = 32 // bits
    padded = np.zeros((len(values), -(-values.shape[1] // per_word) * per_word), dtype=np.uint64)
    padded[:, : values.shape[1]] = values.numpy()
    words = np.zeros((len(values), padded.shape[1] // per_word), dtype=np.uint64)
    for place, member in enumerate(order or range(per_word)):
        words |= padded[:, member::per_word] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def write_gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 16,
    is_v2: bool = False,
    act_order: bool = False,
    symmetric: bool = False,
) -> Written:
    num_inputs = weight.shape[1]
    group = torch.arange(num_inputs) // group_size
    if act_order:
        group = group[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))]
    codes, zeros, scales = codes_of(weight, bits, group)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    qzeros = pack_words(zeros.T, bits)
    if not is_v2:  # from whole words, as GPTQModel does
        ones = sum(1 << place for place in range(0, 32, bits))
        less = (qzeros.numpy().view(np.uint32).astype(np.int64) - ones) % 2**32
        qzeros = torch.from_numpy(less.astype(np.uint32).view(np.int32))
    parts = {
        "qweight": pack_words(codes, bits).T,
        "qzeros": qzeros,
        "scales": scales.T.half(),
        "g_idx": group.int(),
    }
    return parts, (codes - zeros[:, group]) * scales[:, group]


def write_awq(weight: Tensor, *, group_size: int = 16) -> Written:
    group = torch.arange(weight.shape[1]) // group_size
    codes, zeros, scales = codes_of(weight, 4, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": pack_words(codes.T, 4, order),
        "qzeros": pack_words(zeros.T, 4, order),
        "scales": scales.T.half(),
    }
    return parts, (codes - zeros[:, group]) * scales[:, group]


def write_fp8(
    weight: Tensor,
    *,
    block: tuple[int, int] | None = (32, 48),
    per_output: bool = False,
    name: str = "weight_scale_inv",
) -> Written:
    """By blocks, per output, or with one scale."""
    out, num_inputs = weight.shape
    rows, columns = block or ((1, num_inputs) if per_output else (out, num_inputs))
    scale = torch.empty(-(-out // rows), -(-num_inputs // columns))
    codes, plain = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(len(scale)):
        for j in range(scale.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
            plain[part] = codes[part].float() * scale[i, j]
    if block is None and not per_output:
        scale = scale.reshape(())
    return {"weight": codes, name: scale}, plain


def write_int8(weight: Tensor) -> Written:
    """bitsandbytes' LLM.int8(): code 127 is the row's largest magnitude."""
    largest = weight.abs().amax(dim=1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes * largest[:, None] / 127


# QLoRA, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def write_nf4(weight: Tensor, *, blocksize: int = 64, nested: bool = False) -> Written:
    table = torch.tensor(NF4)
    padding = -weight.numel() % blocksize  # the last block may be shorter
    blocks = torch.nn.functional.pad(weight.flatten(), (0, padding)).view(-1, blocksize)
    absmax = blocks.abs().amax(dim=1)
    codes = (blocks[:, :, None] / absmax[:, None, None] - table).abs().argmin(dim=-1)
    state = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "float32"}
    state["shape"] = list(weight.shape)
    flat = codes.flatten()[: weight.numel()]
    parts = {"weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None]}
    parts["weight.quant_map"] = table
    parts["weight.absmax"] = absmax
    if nested:
        offset = absmax.mean().item()
        table2 = torch.linspace(-1, 1, 256)
        largest = torch.stack([(part - offset).abs().max() for part in absmax.split(256)])
        spread = largest.repeat_interleave(256)[: len(absmax)]
        nested_codes = ((absmax - offset)[:, None] / spread[:, None] - table2).abs().argmin(-1)
        absmax = table2[nested_codes] * spread + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts["weight.absmax"] = nested_codes.to(torch.uint8)
        parts["weight.nested_absmax"], parts["weight.nested_quant_map"] = largest, table2
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts["weight.quant_state.bitsandbytes__nf4"] = text
    plain = (table[codes] * absmax[:, None]).flatten()[: weight.numel()]
    return parts, plain.view(weight.shape)


# What is published, and the quantization_config that goes with it.
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
V2 = {"checkpoint_format": "gptq_v2"}
CASES: dict[str, tuple[Writer, dict]] = {
    "gptq": (write_gptq, GPTQ),
    "gptq-v2": (partial(write_gptq, is_v2=True), GPTQ | V2),
    "gptq-v2, named as GPTQModel does": (
        partial(write_gptq, is_v2=True),
        GPTQ | {"format": "gptq_v2"},
    ),
    "gptq, act order": (partial(write_gptq, act_order=True), GPTQ | {"desc_act": True}),
    "gptq, symmetric": (partial(write_gptq, symmetric=True), GPTQ | {"sym": True}),
    "gptq, 8 bits": (partial(write_gptq, bits=8), GPTQ | {"bits": 8}),
    "gptq, 2 bits": (partial(write_gptq, bits=2), GPTQ | {"bits": 2}),
    # 64 inputs are two groups and a bit; 96 are three that must not be taken for three of 32.
    "gptq, uneven groups": (partial(write_gptq, group_size=40), GPTQ | {"group_size": 40}),
    "gptq, a group a row": (partial(write_gptq, group_size=96), GPTQ | {"group_size": -1}),
    "awq": (write_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "fp8, blocks": (write_fp8, FP8 | {"weight_block_size": [32, 48]}),
    "fp8, a scale each": (partial(write_fp8, block=None), FP8),
    "fp8, per output": (partial(write_fp8, block=None, per_output=True, name="weight_scale"), FP8),
    "bitsandbytes int8": (write_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes NF4": (write_nf4, BNB4),
    "bitsandbytes NF4, old config": (write_nf4, {"load_in_4bit": True, "load_in_8bit": False}),
    "bitsandbytes NF4, a short last block": (partial(write_nf4, blocksize=4096), BNB4),
    "bitsandbytes NF4, nested": (partial(write_nf4, nested=True), BNB4),
}
