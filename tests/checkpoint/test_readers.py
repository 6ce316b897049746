"""Every reader against weights written from the published layout of its format.

The writers (tests/support/quantized_checkpoints.py) share no code with the readers. AWQ's packs the
same bits as AutoAWQ 0.2.9, and the reader of GPTQ has read what AutoGPTQ 0.7.1 wrote, but for zero
points of 0; neither library installs beside today's transformers.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from dequantized_models import open_checkpoint, our_logits, read_all, reference_logits
from quantized_checkpoints import (
    CASES,
    Writer,
    make_quantized,
    split_into_shards,
    write_int8,
)

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix

cases = pytest.mark.parametrize(("write", "config"), CASES.values(), ids=CASES)


@cases
def test_weights_are_those_of_the_format(write: Writer, config: dict, tmp_path: Path) -> None:
    expected = make_quantized(tmp_path, write, config)
    found = read_all(open_checkpoint(tmp_path))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        if write is write_int8:  # (code x SCB) / 127, and code x (SCB / 127)
            torch.testing.assert_close(found[name], weight, rtol=3e-7, atol=0)
        else:
            assert torch.equal(found[name], weight), name


# One of each method: what differs within one is seen in the weights above.
@pytest.mark.small(
    config=[
        CASES[name][1] for name in ("gptq, act order", "awq", "fp8, blocks", "bitsandbytes int8")
    ]
)
@cases
def test_logits_are_those_of_the_dequantized_model(
    write: Writer, config: dict, tmp_path: Path
) -> None:
    weights = make_quantized(tmp_path / "quantized", write, config)
    expected = reference_logits(tmp_path / "quantized", weights, tmp_path / "reference")
    found = our_logits(tmp_path / "quantized", tmp_path / "plain")
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_parts_of_a_weight_may_lie_in_several_files(tmp_path: Path) -> None:
    expected = make_quantized(tmp_path, *CASES["gptq, act order"])
    split_into_shards(tmp_path)
    found = read_all(open_checkpoint(tmp_path))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_threads_may_share_a_source(tmp_path: Path) -> None:
    expected = make_quantized(tmp_path, *CASES["awq"])
    source = open_checkpoint(tmp_path)
    names = [*expected] * 8
    with ThreadPoolExecutor(8) as pool:
        for name, read in zip(names, pool.map(source.read, names), strict=True):
            weight = read.dequantize() if isinstance(read, QuantizedMatrix) else read
            assert torch.equal(weight, expected[name])


def test_symmetric_weights_have_no_offset_and_runs_no_list_of_groups(tmp_path: Path) -> None:
    """They cost time in every product."""
    make_quantized(tmp_path, *CASES["gptq, symmetric"])
    matrix = open_checkpoint(tmp_path).read("model.layers.0.mlp.up_proj.weight")
    assert matrix.offset is None and matrix.group_of_input is None
    assert (matrix.bits, matrix.group_size, matrix.shape) == (4, 16, (96, 64))


def test_what_is_not_quantized_keeps_its_dtype(tmp_path: Path) -> None:
    make_quantized(tmp_path, *CASES["awq"])
    source = open_checkpoint(tmp_path)
    assert source.read("lm_head.weight").dtype == torch.float32
    with pytest.raises(ValueError, match="no tensor 'model"):
        source.read("model.layers.0.mlp.up_proj.qweight")
