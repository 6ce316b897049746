"""bench.py: its workload is nano-vllm's, and its report holds what was measured."""

import re
import runpy
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve import LLM, SamplingParams

BENCH = Path(__file__).parents[1] / "bench.py"
bench = runpy.run_path(str(BENCH))
draw_workload = bench["draw_workload"]
# On a CPU, older ones ask psutil how much memory there is, and have none without it.
HAS_CB = find_spec("psutil") is not None or int(transformers.__version__.split(".")[1]) >= 23
PEERS = ["transformers", "transformers-cb"] if HAS_CB else ["transformers"]
SMALL = ["--num-seqs", "4", "--input-len", "4-12", "--output-len", "2-6"]


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *SMALL, "--threads", "1", "--device", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True)


def parse_args(monkeypatch: pytest.MonkeyPatch, *options: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    return bench["parse_args"]()


def test_the_workload_is_nano_vllms() -> None:
    """133,966 is the number of output tokens that nano-vllm's own bench.py draws."""
    prompts, output_lens = draw_workload(256, (100, 1024), (100, 1024), vocab_size=151_936)
    assert sum(output_lens) == 133_966
    assert sum(map(len, prompts)) == 142_827
    assert max(map(max, prompts)) == 10_000


def test_a_workload_is_a_set_of_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_args(monkeypatch).num_seqs == 64
    args = parse_args(monkeypatch, "--temperature", "0.25", "--workload", "nano-vllm")
    assert (args.num_seqs, args.input_len, args.output_len) == (256, (100, 1024), (100, 1024))
    assert (args.shape, args.temperature) == ("qwen3-0.6b", 0.25)


def test_the_limit_counts_weights_and_contexts_of_every_step(checkpoint: Path) -> None:
    """14 tokens of prompt and 3 of output take a step of 14, one of 15 and one of 16."""
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        steps = bench["count_bytes"](llm.engine)
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        llm.generate([[5] * 14, [7] * 4], params, use_tqdm=False)
        model = llm.engine.executor.model
        weights = sum(p.nbytes for name, p in model.named_parameters() if "embed" not in name)
    kv = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, bytes
    assert steps == [weights + kv * (14 + 4 + 2 * i) for i in range(3)]


def test_it_imports_no_peer() -> None:
    """One that is not installed, or takes seconds to import, concerns nobody but itself."""
    code = f"import runpy, sys; runpy.run_path({str(BENCH)!r}); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "nanoserve" in modules.stdout.split(), modules.stderr
    assert not {"torch", "transformers", "vllm"} & set(modules.stdout.split())
    assert len(BENCH.read_text().splitlines()) < 300


def test_a_small_vocabulary_changes_no_length() -> None:
    large, large_lens = draw_workload(20, (1, 50), (1, 50), vocab_size=151_936)
    small, small_lens = draw_workload(20, (1, 50), (1, 50), vocab_size=300)
    assert small_lens == large_lens and [*map(len, small)] == [*map(len, large)]
    assert max(map(max, small)) < 300


def test_all_engines_run_and_are_compared() -> None:
    prompts, output_lens = draw_workload(4, (4, 12), (2, 6), vocab_size=2048)
    options = ["--engine", ",".join(["nanoserve", *PEERS]), "--hf-batch-size", "2"]
    options += ["--max-num-batched-tokens", "64", "--max-num-seqs", "3", "--max-model-len", "32"]
    shown = run_bench("--shape", "tiny", "--temperature", "0.7", *options)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    num_in, num_out = sum(map(len, prompts)), sum(output_lens)
    assert f"4 sequences, {num_in} prompt tokens, {num_out} output tokens" in shown.stdout
    lines = [line.split(" | ") for line in shown.stdout.splitlines() if line.startswith("| ")]
    rows = {cells[0].strip("| "): cells[1:] for cells in lines[1:]}
    assert rows.keys() == {"nanoserve", *PEERS}
    for output_speed, total_speed, seconds, *_ in rows.values():
        # Both speeds are of the tokens asked for, so both give the same time.
        assert abs(num_out / float(output_speed) - float(seconds)) < 0.05 * float(seconds) + 0.01
        ratio = float(total_speed) / float(output_speed)
        assert abs(ratio - (num_in + num_out) / num_out) < 0.05 * ratio
    for peer in PEERS:
        assert re.search(rf"^nanoserve / {peer}: \d+\.\d\d \(", shown.stdout, re.MULTILINE)
    assert "KV blocks" in shown.stdout and "preemptions" in shown.stdout
    assert "max_model_len=32, max_num_batched_tokens=64, max_num_seqs=3" in shown.stdout
    assert re.search(r"^roofline: .* GB/s, \d+% of the limit$", shown.stdout, re.MULTILINE)


def test_an_engine_that_fails_is_reported(tmp_path: Path) -> None:
    make_qwen3(tmp_path, dtype="bfloat16")
    edit_json(tmp_path / "config.json", hidden_act="gelu")  # which nanoserve refuses
    shown = run_bench("--model", str(tmp_path))
    assert shown.returncode == 1
    assert "nanoserve FAILED: ValueError: hidden_act='gelu'" in shown.stdout
    assert re.search(r"^\| transformers \| \d", shown.stdout, re.MULTILINE)
    assert "nanoserve / transformers" not in shown.stdout
