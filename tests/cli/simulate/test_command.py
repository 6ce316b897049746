"""`nanoserve simulate`, and a reader's own policy in it."""

import json
import sys
from pathlib import Path

import pytest

from nanoserve.cli.main import main
from nanoserve.cli.simulate.laboratory import load_extension, load_policy
from nanoserve.cli.simulate.replica import NOT_SIMULATED
from nanoserve.engine.extension import Extension
from nanoserve.engine.scheduler import Scheduler

DOCS = Path(__file__).parents[3] / "docs"
TRACE = DOCS / "07-preemption" / "chunked-prefill.jsonl"
GPU = ["simulate", "qwen3-0.6b", "--gpu", "l4", "--max-model-len", "4096"]
POLICY = """
from nanoserve.engine.scheduler import Scheduler


class ShortestFirst(Scheduler):
    def order(self, seq):
        return (seq.num_prompt_tokens, seq.arrival)
"""
EXTENSION = """
from nanoserve.engine.extension import Extension


class OneAtATime(Extension):
    def __init__(self, engine):
        self._scheduler = engine.scheduler

    def may_admit(self, seq, plan):
        return len(self._scheduler.running) < 1
"""


def results_of(tmp_path: Path, *flags: str) -> dict[str, dict[str, float]]:
    file = tmp_path / "results.json"
    assert main([*GPU, "--json", str(file), *flags]) == 0
    return json.loads(file.read_text())["results"]


def test_rates_and_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--request-rate", "5,500", "--num-seqs", "60"
    one = results_of(tmp_path, *flags)
    out = capsys.readouterr().out
    assert "not calibrated" in out and "TTFT p99" in out and len(out.splitlines()) == 4
    assert one["500/s"]["ttft_p50"] > one["5/s"]["ttft_p50"]
    four = results_of(tmp_path, *flags, "--replicas", "4")
    assert four["500/s"]["ttft_p99"] < one["500/s"]["ttft_p99"]


def test_times_of_a_gpu_can_be_scaled(tmp_path: Path) -> None:
    flags = "--num-seqs", "1", "--input-len", "100", "--output-len", "50"
    (best,) = results_of(tmp_path, *flags).values()
    (half,) = results_of(tmp_path, *flags, "--efficiency", "0.5").values()
    (later,) = results_of(tmp_path, *flags, "--fixed-time", "3").values()
    (two,) = results_of(tmp_path, *flags, "-tp", "2").values()
    assert half["itl_p50"] == pytest.approx(2 * best["itl_p50"], rel=0.01)
    assert later["itl_p50"] == pytest.approx(best["itl_p50"] + 3)
    assert 0.5 < two["itl_p50"] / best["itl_p50"] < 0.9


def test_times_of_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Options and blocks are the recorded ones, unless others are given."""
    trace = str(DOCS / "00-first-run" / "first-run.jsonl")
    flags = "--num-seqs", "5", "--input-len", "20-30", "--output-len", "10-20"
    assert main(["simulate", "--fit", trace, *flags]) == 0
    out = capsys.readouterr().out
    assert f"times fitted to {trace}; 59 steps: fixed" in out and "error of a step" in out
    assert main(["simulate", "--fit", trace, "--requests", trace]) == 0


def test_a_policy_is_compared_with_the_default(tmp_path: Path) -> None:
    file = tmp_path / "policies.py"
    file.write_text(POLICY + EXTENSION)
    flags = "--num-seqs", "80", "--max-num-seqs", "4", "--input-len", "10-1000"
    rows = results_of(tmp_path, *flags, "--policy", f"{file}:ShortestFirst")
    assert rows["yours"]["ttft_mean"] < 0.98 * rows["default"]["ttft_mean"]
    assert rows["yours"]["request_rate"] == pytest.approx(rows["default"]["request_rate"], rel=0.05)
    rows = results_of(tmp_path, *flags, "--extension", f"{file}:OneAtATime")
    assert rows["yours"]["request_rate"] < 0.5 * rows["default"]["request_rate"]


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'nanoserve[bench]'")
    plot = tmp_path / "rates.png"
    results_of(tmp_path, "--num-seqs", "9", "--request-rate", "1,9", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_classes_are_loaded_from_files_and_modules(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(POLICY + EXTENSION)
    assert issubclass(load_policy(f"{file}:ShortestFirst"), Scheduler)
    assert issubclass(load_extension(f"{file}:OneAtATime"), Extension)
    module = "nanoserve.features.speculative.extension:Speculation"
    assert load_extension(module).__name__ == "Speculation"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["simulate"], "nothing to predict times from: pass --fit"),
        (["simulate", "--gpu", "tpu"], "gpu='tpu' must be one of l4"),
        (["simulate", "--fit", str(DOCS / "index.md")], "is not JSON"),
        ([*GPU, "--policy", "ShortestFirst"], "must be FILE.py:Class or module:Class"),
        ([*GPU, "--policy", "nowhere.py:A"], "there is no file nowhere.py"),
        ([*GPU, "--policy", "nowhere:A"], "cannot be imported: No module named 'nowhere'"),
        ([*GPU, "--policy", f"{__file__}:Path"], "is not a subclass of Scheduler"),
        ([*GPU, "--efficiency", "1.5"], "efficiency=1.5 must be"),
        ([*GPU, "--kv-offloading-size", "1"], "kv_offloading_size cannot be simulated: leave it"),
        ([*GPU, "--runner", "pooling"], "runner='pooling' cannot be simulated"),
        (["simulate", "qwen3-8b", "--gpu", "rtx-4090", "--dtype", "float32"], "do not fit"),
        (["simulate", "--replay", str(DOCS / "23-scaling-out/two-stages.jsonl")], "stages"),
    ],
)
def test_usage_errors_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("nanoserve simulate: ")
    assert shown.count("\n") == 1


def test_all_options_that_enable_features_are_known() -> None:
    from nanoserve.build import FEATURES

    assert sorted(NOT_SIMULATED) == sorted(FEATURES.names())


def test_torch_is_not_imported(tmp_path: Path) -> None:
    import subprocess

    command = f"from nanoserve.cli.main import main; main({GPU!r} + ['--num-seqs', '3'])"
    command += "; import sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", command], check=True, capture_output=True)
