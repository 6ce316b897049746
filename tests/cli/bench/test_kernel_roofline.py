"""benchmarks/kernel_roofline.py and load_balance.py: what is predicted for a GPU without one."""

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import kernel_roofline
import load_balance
from kernel_roofline import GPUS, Predictor, decode_step, seconds_by_part
from load_balance import Launch, equal_shares, loss, losses, per_row, seconds

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.roofline import Need, Step, planned_steps
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.kernels.triton import paged_attention

QWEN3 = ModelConfig.from_hf(SHAPES["qwen3-0.6b"], {}, "bfloat16")


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(QWEN3, GPUS["h100"], launch_seconds=1e-6)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
def test_the_launches_read_what_the_model_needs_and_little_more(
    predictor: Predictor, num_rows: int
) -> None:
    """Activations go through memory between two kernels: 2 % at most, and parts of attention."""
    step = decode_step(num_rows, 820)
    launched = sum(launch.num_bytes for launch, _ in predictor.step(step))
    needed = Need(QWEN3).bytes(step)
    assert needed < launched < 1.04 * needed, launched / needed


def test_the_operations_are_those_of_the_model(predictor: Predictor) -> None:
    for step in (decode_step(8, 820), Step(np.array([1, 1, 300]), np.array([9, 50, 400]), 3)):
        launched = sum(launch.num_operations for launch, _ in predictor.step(step))
        assert launched == Need(QWEN3).operations(step)


def test_every_launch_takes_its_bytes_and_a_place_in_the_graph(predictor: Predictor) -> None:
    launches = predictor.step(decode_step(256, 820))
    counts = Counter(launch.name for launch, _ in launches)
    assert counts["linear"] == 4 * 28 + 1 and counts["_store_kv"] == counts["_act_and_mul"] == 28
    (attention, attending), *_ = [pair for pair in launches if pair[0].layer is not None]
    assert attention.num_bytes == pytest.approx(256 * 820 * 4096, rel=0.01)
    assert attending == pytest.approx(1e-6 + attention.num_bytes / 3e12)
    (sampler, sampling), *_ = [pair for pair in launches if pair[0].name == "_best_of_parts"]
    assert sampler.num_bytes == pytest.approx(256 * 151_936 * 2, rel=0.01)
    assert sampling > 1e-6 + sampler.num_bytes / 3e12  # its instructions take longer
    free = Predictor(QWEN3, GPUS["h100"], launch_seconds=0).step(decode_step(256, 820))
    saved = sum(s for _, s in launches) - sum(s for _, s in free)
    assert saved == pytest.approx(len(launches) * 1e-6)


def test_a_workload_cannot_be_faster_than_its_roofline(predictor: Predictor) -> None:
    config = EngineConfig("none", max_num_seqs=8, max_num_batched_tokens=256)
    prompts = [[1] * (50 + 30 * i) for i in range(12)]
    limit, parts = seconds_by_part(predictor, planned_steps(config, prompts, [20] * 12))
    assert all(seconds > 0 for seconds in parts.values()) and len(parts) == 4
    assert 0 < limit < sum(parts.values()) < 3 * limit


def test_other_kernels_are_fewer_and_multiply_the_same(predictor: Predictor) -> None:
    kernels = KernelConfig(dependent_launch=True, merge_in_attention=True, split_products=True)
    overheads = {"launch_seconds": 1e-6, "dependent_seconds": 4e-7}
    other = Predictor(QWEN3, GPUS["h100"], **overheads, kernels=kernels)
    step = decode_step(8, 820)
    other.step(step)  # the first launches create the counters of arrivals
    other.launches.cache_clear()
    before, after = predictor.step(step), other.step(step)
    assert len(before) - len(after) == 2 * 28
    for launches in (before, after):
        assert sum(each.num_operations for each, _ in launches) == Need(QWEN3).operations(step)
    is_early = {each.name for each, _ in after if each.is_dependent}
    assert is_early == {each.name for each, _ in after if each.name.startswith(("_", "decode"))}
    assert {each.name for each, _ in before if each.is_dependent} == {
        "decode_attention_kernel",
        "merge_parts_kernel",
    }
    assert all(took >= (4e-7 if each.is_dependent else 1e-6) for each, took in after)


@pytest.mark.parametrize(
    ("quantization", "activations", "product"),
    [
        ("fp8", None, "_scaled_product"),
        ("int8", "int8", "_scaled_product"),
        ("int8", None, "_grouped_product"),
    ],
)
def test_quantized_weights_are_read_once_in_their_bits(
    quantization: str, activations: str | None, product: str
) -> None:
    """And the codes of three linears of a layer may come from the kernel before."""
    options = {"quantization": quantization}
    if activations is not None:
        options["quantization_activations"] = activations
    step, counts = decode_step(8, 820), []
    for fused in (False, True):
        kernels = KernelConfig(fused_quantization=fused)
        each = Predictor(QWEN3, GPUS["h100"], 1e-6, kernels=kernels, quantization=options)
        launches = [launch for launch, _ in each.step(step)]
        names = Counter(launch.name for launch in launches)
        assert names[product] == 4 * 28 + 1 and names["linear"] == 0
        assert sum(launch.num_operations for launch in launches) == Need(QWEN3).operations(step)
        read = sum(launch.num_bytes for launch in launches if launch.name == product)
        weights = Need(QWEN3).dense + Need(QWEN3).head
        assert weights < read < 1.1 * weights  # with partial sums, where inputs are split
        assert each.limit(step) < 0.8 * Predictor(QWEN3, GPUS["h100"], 1e-6).limit(step)
        counts.append(names["_quantize_rows"] + names["_quantize_groups"])
    is_quantized = product == "_scaled_product"
    assert counts == ([4 * 28 + 1, 28 + 1] if is_quantized else [0, 0])


def test_the_tables_are_printed(
    full_size: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --full by the command, where nothing asks for the interpreter."""
    command = [kernel_roofline.__file__, "--shape", "tiny", "--gpu", "h200", "--rows", "1,8"]
    if full_size:
        environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
        command = [sys.executable, *command]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        shown = ran.stdout
    else:
        monkeypatch.setattr(sys, "argv", [*command, "--no-workload"])
        kernel_roofline.main()
        shown = capsys.readouterr().out
    assert "tiny on h200: 4.3 TB/s" in shown and "8 rows of 820 tokens" in shown
    assert "| _add_rms_norm | 13 |" in shown
    assert ("nano-vllm's workload" in shown) == full_size


# ---------------------------------------------------------------- load balance

CONTEXTS = [1, 64, 65, 700, 1900, 3, 512]


@pytest.mark.parametrize("cut", [per_row, equal_shares])
def test_every_key_is_read_once(cut) -> None:
    launch = Launch(num_sms=20)
    for contexts in (CONTEXTS, [5000], [100] * 40, [1]):
        read = sum(num_bytes for program in cut(launch, contexts) for _, num_bytes in program)
        assert read == sum(contexts) * launch.num_kv_heads * launch.key_bytes


def test_shares_are_equal_but_for_the_last_and_have_a_program_for_each_head() -> None:
    """Of the 54 tiles, 5 shares have 11 at most."""
    launch = Launch(num_sms=20)
    programs = equal_shares(launch, CONTEXTS)
    shares = programs[:: launch.num_kv_heads]
    assert programs == [share for share in shares for _ in range(launch.num_kv_heads)]
    keys = [[num_bytes / launch.key_bytes for _, num_bytes in share] for share in shares]
    tiles = [sum(-(-num_keys // launch.tile) for num_keys in share) for share in keys]
    assert tiles == [11, 11, 11, 11, 10]
    # Cut at the borders of rows: tiles 7 to 10 of the fourth row are in the second share.
    assert keys[:2] == [[1, 64, 65, 7 * 64], [700 - 7 * 64, 7 * 64]]
    assert [wait for wait, _ in shares[1]] == [launch.first_tile, launch.next_row]


def test_as_many_programs_are_simulated_as_are_launched() -> None:
    config = paged_attention.tile_config(128, torch.bfloat16, 2, is_decode=True)
    assert (Launch().shares_per_sm, Launch().tile) == (config.num_programs, config.tile_n)
    assert len(equal_shares(Launch(), [820] * 256)) == 33 * 8  # 2 * 132 // 8 shares


def test_the_simulation_is_right_where_one_can_reckon() -> None:
    launch = Launch(num_sms=2, programs_per_sm=1, bandwidth=100.0, per_program=80.0)
    assert seconds(launch, [[(1.0, 160.0)]]) == 1 + 160 / 80
    assert seconds(launch, [[(1.0, 100.0)]] * 2) == 1 + 200 / 100
    assert seconds(launch, [[(1.0, 100.0)]] * 3) == 1 + 200 / 100 + 1 + 100 / 80
    # The second has read 80 when the first begins; both go on with 50; then 80 are left.
    assert seconds(launch, [[(1.0, 100.0)], [(0.0, 100.0)]]) == pytest.approx(1 + 20 / 50 + 80 / 80)
    # The second reads alone while the first waits for its next row.
    pieces = [[(0.0, 50.0), (2.0, 0.0)], [(0.0, 130.0)]]
    assert seconds(launch, pieces) == 1 + max(2.0, 80 / 80)
    assert loss(launch, [[(1.0, 100.0)]] * 2) == pytest.approx(0.5)


def test_equal_shares_lose_less_than_programs_of_one_row(full_size: bool) -> None:
    """Over the workload of nano-vllm: how much depends on what a program alone can read."""
    config = EngineConfig("none", max_num_batched_tokens=8192)
    steps = list(load_balance.nano_vllm_steps(config, 151_936)[0])[:: 24 if full_size else 96]
    for per_program, least in ((25e9, 0.04), (15e9, 0.08)):
        found = losses(Launch(per_program=per_program), steps)
        assert found["per row"] > max(least, 2 * found["equal shares"])
        assert found["equal shares"] < 0.05


def test_the_losses_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["load_balance.py", "--every", "600"])
    load_balance.main()
    assert capsys.readouterr().out.count("%") == 12
