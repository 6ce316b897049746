"""The numbers of the chapter on CUDA graphs, against values worked by hand."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_qwen3, prompt_logits

from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import UnquantizedLinearMethod
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.qwen3 import Qwen3ForCausalLM
from nanoserve.worker.cuda_graphs import graph_sizes

from . import worked


def test_kernels_of_a_step() -> None:
    assert worked.num_kernels(layers=28) == 3 + 28 * 9 == 255
    assert worked.num_kernels(layers=28, has_merge=True) == 3 + 28 * 10 == 283
    assert "| **all** | | **255** |" in worked.kernels_table(layers=28)
    assert "| matrix product: qkv, o, gate and up, down | 4 | 112 |" in worked.kernels_table(28)


def test_calls_with_piecewise_graphs() -> None:
    assert worked.piecewise_calls(layers=28) == 29 + 28 == 57
    assert worked.piecewise_calls(layers=28, has_merge=True) == 29 + 56 == 85


def test_the_kernels_match_the_calls_of_the_model(tmp_path: Path) -> None:
    """Counted on a CPU: one call there is one kernel launch on a GPU."""
    calls: Counter[str] = Counter()

    def counted(name: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        return call

    def norm_rotate_store(heads: torch.Tensor, *_: Any) -> torch.Tensor:
        return heads[:, : config.num_attention_heads]

    make_qwen3(tmp_path)
    config = ModelConfig.from_checkpoint(tmp_path)
    attention, ops, linear = TorchAttention(), TorchOps(), UnquantizedLinearMethod()
    ops.norm_rotate_store = norm_rotate_store  # on a GPU one kernel; here all values are zero
    for part, names in (
        (attention, ["attend"]),
        (ops, ["add_rms_norm", "act_and_mul", "norm_rotate_store"]),
        (linear, ["apply"]),
    ):
        for name in names:
            setattr(part, name, counted(name, getattr(part, name)))
    context = LayerContext(attention=attention, ops=ops, linear_method=linear)
    model = Qwen3ForCausalLM(config, context)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    prompt_logits(model, [1, 2, 3])
    layers = config.num_hidden_layers
    assert calls == {
        "attend": layers,
        "add_rms_norm": 2 * layers + 1,
        "act_and_mul": layers,
        "norm_rotate_store": layers,
        "apply": 4 * layers + 1,  # the LM head is not in the graph
    }
    embedding_and_zeros = 2
    assert calls.total() - 1 + embedding_and_zeros == worked.num_kernels(layers)


def test_weights_that_a_step_reads() -> None:
    assert worked.weights_read(worked.QWEN3["Qwen3-0.6B"]) == 596_049_920
    # 8,190,735,360 parameters, but only the batch's rows of the embedding, which is not tied.
    expected = 8_190_735_360 - 151_936 * 4096
    assert worked.weights_read(worked.QWEN3["Qwen3-8B"]) == expected


def test_launches_against_reading() -> None:
    small, large = worked.QWEN3["Qwen3-0.6B"], worked.QWEN3["Qwen3-8B"]
    assert worked.launch_ms(255, microseconds=10) == pytest.approx(2.55)
    assert worked.reading_ms(small, 2, bytes_per_second=2e12) == pytest.approx(0.596, abs=1e-3)
    assert worked.reading_ms(large, 2, bytes_per_second=2e12) == pytest.approx(7.568, abs=1e-3)
    table = worked.launches_table(10, dtype_bytes=2, bytes_per_second=2e12)
    assert "| Qwen3-0.6B | 255 | 2.55 | 0.60 | 23% |" in table
    assert "| Qwen3-8B | 327 | 3.27 | 7.57 | 100% |" in table


@pytest.mark.parametrize("max_num_seqs", [1, 2, 11, 16, 20, 256, 300, 1024])
def test_sizes_are_the_engines(max_num_seqs: int) -> None:
    assert worked.sizes(max_num_seqs) == graph_sizes(max_num_seqs)


def test_sizes() -> None:
    assert worked.sizes(20) == [1, 2, 4, 8, 16, 20]
    assert len(worked.sizes(256)) == 20
    chosen = [worked.size_for(rows, 256) for rows in (1, 3, 9, 17, 33, 256)]
    assert chosen == [1, 4, 16, 32, 48, 256]
    # 1 from 3 and 4, 6 from 5 to 8, 28 from 9 to 16, and 120 from each of fifteen groups of 16.
    assert worked.mean_dummies(256) == pytest.approx((1 + 6 + 28 + 15 * 120) / 256)
    assert "| 17 | 32 | 15 |" in worked.sizes_table([1, 17], 256)


def test_replays_of_a_batch_with_fewer_and_fewer_rows() -> None:
    """The same lengths as in test_gpu_runner, which tests the runner."""
    lengths = [3, 5, 9, 9, 12]
    assert worked.rows_of_steps(lengths) == [5] * 3 + [4] * 2 + [3] * 4 + [1] * 3
    assert worked.replays_table(lengths, max_num_seqs=11).splitlines()[2:] == [
        "| 0 | 5 | prefill, eager | |",
        "| 1 to 2 | 5 | graph of 8 | 3 |",
        "| 3 to 4 | 4 | graph of 4 | 0 |",
        "| 5 to 8 | 3 | graph of 4 | 1 |",
        "| 9 to 11 | 1 | graph of 1 | 0 |",
    ]
