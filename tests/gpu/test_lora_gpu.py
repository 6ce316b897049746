"""Adapters on an NVIDIA GPU: launched one by one, by the kernels of `adapter_kernels`, in graphs.

    pytest -m gpu tests/gpu/test_lora_gpu.py

In float32 tokens must be those of a CPU, whatever computes them. In 16 bits, which tensor cores
multiply, and Triton's interpreter does not, the kernels are compared with float64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from adapter_products import CASES, TOLERANCE, Case, check_bits, check_products
from lora_models import ALL, ATTENTION, MLP, request_for, write_adapter
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.worker import adapted_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

OPTIONS: dict[str, Any] = {
    **{"dtype": "float32", "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 3},
    **{"max_num_seqs": 12, "max_num_batched_tokens": 256, "max_model_len": 256},
    **{"num_kv_blocks": 400, "enable_prefix_caching": False},
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "enforce_eager": False}
KERNELS: dict[str, Any] = {"kernel_config": {"adapter_kernels": True}}
Asked = tuple[Path, list[list[int]], list[LoRARequest | None]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A base, and prompts with one of four adapters or none."""
    base = tmp_path_factory.mktemp("base")
    model, adapters = make_qwen3(base).eval(), [None]
    for index, targets in enumerate((ALL, ATTENTION, MLP, ("q_proj", "down_proj"))):
        folder = base / f"adapter{index}"
        write_adapter(model, folder, index, targets, (16, 4, 3, 8)[index], size=0.15)
        adapters.append(request_for(folder, folder.name, index + 1))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 1 + 17 * index % 90).tolist() for index in range(30)]
    return base, prompts, [adapters[index % 5] for index in range(30)]


def answers(asked: Asked, device: str, **options: Any) -> list[list[int]]:
    base, prompts, adapters = asked
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(base, device=device, **OPTIONS | options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(asked: Asked) -> list[list[int]]:
    return answers(asked, "cpu", attention_backend="torch")


@pytest.mark.parametrize(
    ("options", "has_graphs"),
    [
        ({}, False),
        ({"enforce_eager": True}, False),
        (KERNELS | {"enforce_eager": True}, False),
        (KERNELS, True),
        (KERNELS | {"capture_sampling": True}, True),
        (KERNELS | {"speculative_config": DRAFTS}, True),
        ({"kernel_config": {"adapter_kernels": True, "dependent_launch": True}}, True),
    ],
    ids=str,
)
def test_tokens_are_those_of_a_cpu(
    options: dict[str, Any],
    has_graphs: bool,
    asked: Asked,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: list[bool] = []
    replay: Callable[..., Any] = adapted_graphs.AdaptedGraphs.replay

    def watched(graphs: Any, *step: Any) -> Any:
        output = replay(graphs, *step)
        replayed.append(output is not None)
        return output

    monkeypatch.setattr(adapted_graphs.AdaptedGraphs, "replay", watched)
    assert answers(asked, "cuda", **options) == expected
    assert any(replayed) is has_graphs


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 23, 70, 1000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_get_their_adapters_products(case: Case, num_rows: int, dtype: torch.dtype) -> None:
    check_products(case, num_rows, dtype, torch.device("cuda"))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_bits_of_a_row_depend_on_no_other(dtype: torch.dtype) -> None:
    check_bits(CASES[1], 300, dtype, torch.device("cuda"))
