"""bench.py: its workload is nano-vllm's, and its report holds what was measured."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

from tiny_checkpoints import edit_json, make_qwen3

BENCH = Path(__file__).parents[1] / "bench.py"
draw_workload = runpy.run_path(str(BENCH))["draw_workload"]
SMALL = ["--num-seqs", "4", "--input-len", "4-12", "--output-len", "2-6"]


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *SMALL, "--threads", "1", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_workload_is_nano_vllms() -> None:
    """133,966 is the number of output tokens that nano-vllm's own bench.py draws."""
    prompts, output_lens = draw_workload(256, (100, 1024), (100, 1024), vocab_size=151_936)
    assert sum(output_lens) == 133_966
    assert sum(map(len, prompts)) == 142_827
    assert max(map(max, prompts)) == 10_000


def test_a_small_vocabulary_changes_no_length() -> None:
    large, large_lens = draw_workload(20, (1, 50), (1, 50), vocab_size=151_936)
    small, small_lens = draw_workload(20, (1, 50), (1, 50), vocab_size=300)
    assert small_lens == large_lens and [*map(len, small)] == [*map(len, large)]
    assert max(map(max, small)) < 300


def test_both_engines_run_and_are_compared() -> None:
    prompts, output_lens = draw_workload(4, (4, 12), (2, 6), vocab_size=2048)
    shown = run_bench("--shape", "tiny", "--hf-batch-size", "2")
    assert shown.returncode == 0, shown.stderr
    num_in, num_out = sum(map(len, prompts)), sum(output_lens)
    assert f"4 sequences, {num_in} prompt tokens, {num_out} output tokens" in shown.stdout
    lines = [line.split(" | ") for line in shown.stdout.splitlines() if line.startswith("| ")]
    rows = {cells[0].strip("| "): cells[1:] for cells in lines[1:]}
    assert rows.keys() == {"nanoserve", "transformers"}
    for output_speed, total_speed, seconds, *_ in rows.values():
        # Both speeds are of the tokens asked for, so both give the same time.
        assert abs(num_out / float(output_speed) - float(seconds)) < 0.05 * float(seconds) + 0.01
        ratio = float(total_speed) / float(output_speed)
        assert abs(ratio - (num_in + num_out) / num_out) < 0.05 * ratio
    assert re.search(r"^nanoserve / transformers: \d+\.\d\d \(", shown.stdout, re.MULTILINE)
    assert "KV blocks" in shown.stdout and "preemptions" in shown.stdout


def test_an_engine_that_fails_is_reported(tmp_path: Path) -> None:
    make_qwen3(tmp_path, dtype="bfloat16")
    edit_json(tmp_path / "config.json", hidden_act="gelu")  # which nanoserve refuses
    shown = run_bench("--model", str(tmp_path))
    assert shown.returncode == 1
    assert "nanoserve FAILED: ValueError: hidden_act='gelu'" in shown.stdout
    assert re.search(r"^\| transformers \| \d", shown.stdout, re.MULTILINE)
    assert "nanoserve / transformers" not in shown.stdout
