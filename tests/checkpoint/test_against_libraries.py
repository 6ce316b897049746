"""Readers against the libraries of their formats, which write the weights and dequantize them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dequantized_models import open_checkpoint, our_logits, read_all, reference_logits
from quantized_checkpoints import Written, make_quantized, write_fp8
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json
from torch import Tensor

from nanoserve.checkpoint.formats.compressed_tensors import mxfp4_matrix
from nanoserve.checkpoint.formats.source import open_quantized

GROUP = {"strategy": "group", "group_size": 16}
CHANNEL, TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
BLOCK = {"strategy": "block", "block_structure": [32, 48]}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT4, INT8, FLOAT8 = (
    {"num_bits": 4, "type": "int"},
    {"num_bits": 8, "type": "int"},
    {"num_bits": 8, "type": "float"},
)
ASYMMETRIC = {"symmetric": False}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
COMPRESSED = {
    "int8 per row": ("int-quantized", INT8 | CHANNEL),
    "int8 a scale each": ("int-quantized", INT8 | TENSOR),
    "int8 asymmetric": ("int-quantized", INT8 | CHANNEL | ASYMMETRIC),
    "int8 in groups": ("int-quantized", INT8 | GROUP),
    "int4 packed": ("pack-quantized", INT4 | GROUP),
    "int4 packed, asymmetric": ("pack-quantized", INT4 | GROUP | ASYMMETRIC),
    "int4 packed, per row": ("pack-quantized", INT4 | CHANNEL),
    "int8 packed, asymmetric": ("pack-quantized", INT8 | GROUP | ASYMMETRIC),
    "int4, weights ordered": ("pack-quantized", INT4 | GROUP | {"actorder": "weight"}),
    "fp8 a scale each": ("float-quantized", FLOAT8 | TENSOR),
    "fp8 per row": ("float-quantized", FLOAT8 | CHANNEL),
    "fp8 in blocks": ("float-quantized", FLOAT8 | BLOCK),
    "naive fp8": ("naive-quantized", FLOAT8 | CHANNEL),
    "naive int8": ("naive-quantized", INT8 | CHANNEL),
    "mxfp4": ("mxfp4-pack-quantized", MXFP4 | {"scale_dtype": "torch.uint8"}),
}


def compress(kind: str, weights: dict) -> tuple[Callable, dict]:
    """A writer that is compressed-tensors itself, and its config."""
    pytest.importorskip("compressed_tensors", "0.20")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    inputs = DYNAMIC if kind == "int-quantized" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    scheme = QuantizationScheme(**group)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=kind,
        quantization_status="compressed",
        ignore=["lm_head"],
    ).model_dump(mode="json")
    compressor = BaseCompressor.get_value_from_registry(kind)

    def write(weight: Tensor) -> Written:
        state = {"weight": weight, **scales_of(weight, scheme.weights)}
        parts = compressor.compress(state, scheme)
        return parts, compressor.decompress(dict(parts), scheme)["weight"].float()

    return write, config


def save_parts(parts: dict[str, Tensor], path: Path) -> None:
    """A checkpoint of one linear, "p"."""
    tensors = {f"p.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors")


def scales_of(weight: Tensor, args) -> dict[str, Tensor]:
    """What an observer of compressed-tensors finds: scales and zero points of minima and maxima."""
    from compressed_tensors.quantization.utils import calculate_qparams

    out, num_inputs = weight.shape
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -num_inputs % columns, 0, -out % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
        least, most = blocks.amin((2, 3)), blocks.amax((2, 3))
    elif args.strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
        least, most = groups.amin(2), groups.amax(2)
    elif args.strategy == "channel":
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        least, most = weight.min().reshape(1), weight.max().reshape(1)
    scale, zero = calculate_qparams(least, most, args)
    return {"weight_scale": scale.float(), "weight_zero_point": zero}


@pytest.mark.parametrize(("kind", "weights"), COMPRESSED.values(), ids=COMPRESSED)
def test_compressed_tensors(kind: str, weights: dict, tmp_path: Path) -> None:
    """Exact, or, where there are zero points and float32 scales, to float32 rounding."""
    write, config = compress(kind, weights)
    expected = make_quantized(tmp_path / "quantized", write, config)
    found = read_all(open_checkpoint(tmp_path / "quantized"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        if weights.get("symmetric", True):
            assert torch.equal(found[name], weight), name
        else:
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)
    theirs = reference_logits(tmp_path / "quantized", expected, tmp_path / "reference")
    ours = our_logits(tmp_path / "quantized", tmp_path / "plain")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_end_within_a_word(bits: int, tmp_path: Path) -> None:
    """59 codes of 4 bits are 7.4 words, and 90 zero points 11.25: `weight_shape` says where."""
    args = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "channel"}
    write, config = compress("pack-quantized", args)
    parts, expected = write(torch.randn(90, 59, generator=torch.Generator().manual_seed(0)))
    save_parts(parts, tmp_path)
    source = open_quantized(tmp_path, config)
    assert source.shapes() == {"p.weight": (90, 59)}
    torch.testing.assert_close(source.read("p.weight").dequantize(), expected)


def test_several_schemes_in_one_checkpoint(tmp_path: Path) -> None:
    """A pattern wins over "Linear", and each group may have a format of its own."""
    write8, config = compress("int-quantized", INT8 | CHANNEL)
    write4, other = compress("pack-quantized", INT4 | GROUP | ASYMMETRIC)
    group_8, group_4 = (one["config_groups"]["group_0"] for one in (config, other))
    config["format"] = "mixed-precision"
    config["config_groups"] = {
        "group_0": group_8 | {"format": "int-quantized"},
        "group_1": group_4 | {"format": "pack-quantized", "targets": ["re:.*[.][kv]_proj$"]},
    }
    expected = make_quantized(
        tmp_path, lambda weight: (write4 if len(weight) == 32 else write8)(weight), config
    )
    found = read_all(open_checkpoint(tmp_path))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)


def test_groups_of_activation_order(tmp_path: Path) -> None:
    """compressed-tensors does not write `weight_g_idx` any more: here its columns are permuted."""
    write, config = compress("pack-quantized", INT4 | GROUP | ASYMMETRIC)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    grouped = torch.randn(96, 64, generator=torch.Generator().manual_seed(4))
    parts, plain = write(grouped)  # as its columns lie while they are grouped
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32 as unpack

    codes = unpack(parts["weight_packed"], 4, torch.Size((96, 64)))
    g_idx = torch.empty(64, dtype=torch.int32)
    g_idx[order] = (torch.arange(64) // 16).int()
    stored, expected = torch.empty_like(codes), torch.empty_like(plain)
    stored[:, order], expected[:, order] = codes, plain
    parts |= {"weight_packed": pack_to_int32(stored, 4), "weight_g_idx": g_idx}
    save_parts(parts, tmp_path)
    found = open_quantized(tmp_path, config).read("p.weight").dequantize()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    del parts["weight_g_idx"]
    save_parts(parts, tmp_path)
    with pytest.raises(ValueError, match=r"p\.weight_g_idx is missing"):
        open_quantized(tmp_path, config)


# ---------------------------------------------------------------- bitsandbytes


@pytest.mark.small(nested=[True], storage=[torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_bitsandbytes_4_bits(
    quant_type: str, nested: bool, storage: torch.dtype, tmp_path: Path
) -> None:
    """Exact, or, of nested scales, to float32 rounding."""
    functional = pytest.importorskip("bitsandbytes.functional")

    def write(weight: Tensor) -> Written:
        packed, state = functional.quantize_4bit(
            weight, quant_type=quant_type, compress_statistics=nested, quant_storage=storage
        )
        plain = functional.dequantize_4bit(packed, state).view(weight.shape)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, plain

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    compare(write, config, tmp_path, rtol=1e-6 if nested else 0)


def test_bitsandbytes_8_bits(tmp_path: Path) -> None:
    """To float32 rounding: the library multiplies by 1 / 127."""
    functional = pytest.importorskip("bitsandbytes.functional")

    def write(weight: Tensor) -> Written:
        codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
        return {"weight": codes, "SCB": largest}, functional.int8_vectorwise_dequant(codes, largest)

    compare(write, {"quant_method": "bitsandbytes", "load_in_8bit": True}, tmp_path, rtol=1e-6)


def compare(write: Callable, config: dict, folder: Path, rtol: float) -> None:
    # bitsandbytes' CPU kernel (0.50) misreads blocks that go over the end of a row: 64 and 128
    # inputs are whole ones. Others are in test_readers.py, against the formula.
    expected = make_quantized(folder / "quantized", write, config, intermediate_size=128)
    found = read_all(open_checkpoint(folder / "quantized"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=rtol, atol=rtol * 0.1)
    theirs = reference_logits(folder / "quantized", expected, folder / "reference")
    ours = our_logits(folder / "quantized", folder / "plain")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- transformers' own


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_block_fp8_against_transformers(kind: torch.dtype, tmp_path: Path) -> None:
    """Exact, also with scales of 8 bits that are powers of two."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")

    def write(weight: Tensor) -> Written:
        parts, _ = write_fp8(weight, block=(16, 32))
        scale = parts["weight_scale_inv"].log2().ceil().exp2()
        if kind == torch.uint8:
            parts["weight_scale_inv"] = (scale.log2() + 127).to(torch.uint8)
        else:
            parts["weight_scale_inv"] = scale.to(kind)
        operation = finegrained.Fp8Dequantize(None)
        scale = parts["weight_scale_inv"]
        return parts, operation._dequantize_one(parts["weight"], scale, torch.float32)

    config = {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"}
    compare(write, config, tmp_path, rtol=0)


def test_mxfp4_against_transformers() -> None:
    """gpt-oss' `_blocks` [experts, out, groups, 16] and `_scales`, of one expert; exact."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (1, 24, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 250, (1, 24, 3), dtype=torch.uint8, generator=generator)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    matrix = mxfp4_matrix(blocks[0].flatten(1), scales[0], "here")
    assert torch.equal(matrix.dequantize(), expected)
    assert int(matrix.codes.abs().max()) == 12
    scales[0, 5, 1] = 255
    with pytest.raises(ValueError, match="here has NaN"):
        mxfp4_matrix(blocks[0].flatten(1), scales[0], "here")


def test_scales_of_fused_layers_stay_apart(tmp_path: Path) -> None:
    """q, k and v are one product in the model; each brings its own scale, 100 times another's."""
    factors = {64: 1.0, 32: 100.0}

    def write(weight: Tensor) -> Written:
        return write_fp8(weight * factors.get(len(weight), 1.0), block=None)

    expected = make_quantized(tmp_path, write, {"quant_method": "fp8"})
    stored = load_file(tmp_path / "model.safetensors")
    scales = [stored[f"model.layers.0.self_attn.{n}_proj.weight_scale_inv"] for n in "qkv"]
    assert scales[1] > 50 * scales[0] and scales[1] != scales[2]
    found = read_all(open_checkpoint(tmp_path))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    edit_json(tmp_path / "config.json", quantization_config=...)
