"""`nanoserve bench`: its workload is nano-vllm's, and its report holds what was measured."""

import ast
import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import child
import pytest
import transformers
from child import measure
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve.cli.bench import compare
from nanoserve.cli.bench.compare import COMMON, parse_args, parse_engine
from nanoserve.cli.bench.report import Point, agreement, offline_table, print_comparison
from nanoserve.cli.bench.roofline import Limit
from nanoserve.cli.bench.workloads import draw_workload

BENCH = Path(__file__).parents[3] / "bench.py"
# On a CPU, older ones ask psutil how much memory there is, and have none without it.
HAS_CB = find_spec("psutil") is not None or int(transformers.__version__.split(".")[1]) >= 23
PEERS = ["transformers", "transformers-cb"] if HAS_CB else ["transformers"]
SMALL = ["--num-seqs", "4", "--input-len", "4-12", "--output-len", "2-6"]
RUN_CHILD = compare.run_child
PROMPTS, LENS = [[5] * 9, [6, 7], [8] * 4], [4, 2, 6]


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *SMALL, "--threads", "1", "--device", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True)


def in_this_process(job: str, spec: dict[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """As `compare.run_child`, but for the process, and for a machine that needs no measuring."""
    if python != sys.executable:
        return RUN_CHILD(job, spec, python)
    if job == "probe":
        speeds = dict.fromkeys(("bandwidth", "matmul_rate", "integer_rate"), 1e9)
        return {"device": "cpu", "hardware": "some CPU", "threads": 1, **speeds}
    given = Namespace(**json.loads(json.dumps(spec)))
    try:
        return child.weights(given) if job == "weights" else child.measure(job, given)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


@pytest.fixture
def bench(
    full_size: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The command's exit status and what it prints; with --full of processes, one an engine."""

    def run(*options: str) -> tuple[int, str]:
        if full_size:
            done = run_bench(*options)
            return done.returncode, done.stdout
        monkeypatch.setattr(compare, "run_child", in_this_process)
        status = compare.main([*SMALL, "--threads", "1", "--device", "cpu", *options])
        return status, capsys.readouterr().out

    return run


def make_spec(model: Path, **others: Any) -> Namespace:
    spec = {"model": str(model), "prompts": PROMPTS, "output_lens": LENS, "options": {}}
    spec |= {"device": "cpu", "dtype": "float32", "threads": 1, "temperature": 0.0}
    spec |= dict.fromkeys(COMMON) | {"batching": "continuous", "arrivals": None}
    spec |= {"plot": None, "slo_ttft": 10.0, "slo_itl": 10.0}
    return Namespace(**spec | others)


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


def test_prompts_share_a_beginning_and_nothing_else() -> None:
    prompts, _ = draw_workload(8, (32, 32), (4, 4), vocab_size=151_936, shared_len=512)
    assert [len(prompt) for prompt in prompts] == [544] * 8
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:516]) for prompt in prompts}) == 8


def test_a_turn_repeats_its_conversation() -> None:
    """Two conversations of three turns; between two prompts lie an answer and a message."""
    prompts, lens = draw_workload(6, (5, 5), (7, 7), vocab_size=1000, shared_len=10, turns=3)
    assert [len(prompt) for prompt in prompts] == [15, 15, 27, 27, 39, 39]
    for earlier, later in ((0, 2), (2, 4), (1, 3), (3, 5)):
        assert prompts[later][: len(prompts[earlier])] == prompts[earlier]
    assert prompts[0][:10] == prompts[1][:10] and prompts[0][10:] != prompts[1][10:]
    assert lens == [7] * 6


def test_a_workload_is_a_set_of_defaults() -> None:
    args = parse_args([])
    assert (args.num_seqs, args.model, args.shape) == (64, "tiny-qwen3", None)
    args = parse_args(["--temperature", "0.25", "--workload", "nano-vllm"])
    assert (args.num_seqs, args.input_len, args.output_len) == (256, (100, 1024), (100, 1024))
    assert (args.model, args.shape, args.temperature) == (None, "qwen3-0.6b", 0.25)
    args = parse_args(["--workload", "nano-vllm", "--model", "somewhere"])
    assert (args.model, args.shape) == ("somewhere", None)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SystemExit):
        parse_args(["--batching", "static", "--request-rate", "2"])
    with pytest.raises(SystemExit, match="must be one of nanoserve, transformers"):
        parse_args(["--engine", "nanoserve,sglang"])


def test_an_engine_may_have_options_of_its_own() -> None:
    assert parse_engine("vllm") == ("vllm", {"options": {}})
    name, own = parse_engine("nanoserve:batching=static:block_size=32:enforce_eager=true")
    assert name == "nanoserve"
    assert own == {"batching": "static", "enforce_eager": True, "options": {"block_size": 32}}


def test_it_imports_no_peer() -> None:
    """One that is not installed, or takes seconds to import, concerns nobody but itself."""
    code = "import nanoserve.cli.bench.compare, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "nanoserve" in modules.stdout.split(), modules.stderr
    unwanted = {"torch", "transformers", "vllm", "llama_cpp", "matplotlib"}
    assert not unwanted & set(modules.stdout.split())


def test_peers_run_where_nanoserve_is_not_installed() -> None:
    """What a peer's process imports names nanoserve nowhere."""
    folder = Path(compare.__file__).parent
    others = [folder / "child.py", folder / "latency.py", folder / "hardware.py"]
    files = [*others, *(folder / "engines").glob("*.py")]
    found = {
        file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "nanoserve" in ast.unparse(node)
    }
    assert found == {"nanoserve_engine.py"}
    assert len(files) >= 10


def test_an_engine_gives_the_same_tokens_offline_in_batches_and_one_by_one(
    checkpoint: Path,
) -> None:
    arrivals = {"arrivals": [0.0, 0.01, 0.02]}
    ahead = {"plot": "x.png", "options": {"async_scheduling": True}}
    ways = ({}, {"batching": "static", "max_num_seqs": 2}, arrivals, {"plot": "x.png"}, ahead)
    runs = [measure("nanoserve", make_spec(checkpoint, **way)) for way in ways]
    assert all(run["outputs"] == runs[0]["outputs"] for run in runs)
    assert [run["facts"]["steps"] for run in runs[:2]] == [6, 4 + 6]
    assert runs[2]["latencies"]["goodput"] == runs[2]["latencies"]["request_rate"] > 0
    assert runs[3]["step_times"]["model"] > 0 and runs[0]["step_times"] is None
    assert runs[4]["facts"]["steps"] == 6 and runs[4]["step_times"] is None  # steps overlap


@pytest.mark.small(peer=["transformers"])
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_agrees_with_nanoserve(peer: str, checkpoint: Path) -> None:
    ours, theirs = (measure(name, make_spec(checkpoint)) for name in ("nanoserve", peer))
    assert theirs["outputs"] == ours["outputs"]
    told = agreement(ours["outputs"], theirs["outputs"])
    assert told == "3 of 3 first tokens, 12 of 12 up to each first difference,"
    online = measure(peer, make_spec(checkpoint, arrivals=[0.0, 0.01, 0.02]))
    if peer == "transformers":
        assert online == {"missing": "offline only; it cannot accept requests while others run"}
    else:
        assert online["outputs"] == ours["outputs"]


def test_a_single_stream_has_a_decode_speed(
    checkpoint: Path,
) -> None:
    prompt = list(range(40))
    run = measure("nanoserve", make_spec(checkpoint, prompts=[prompt], output_lens=[8]))
    assert 0 < run["first_token"] < run["seconds"]
    assert run["facts"]["prefix-cache hit rate"] == "0.0%"  # the first token's prompt is another
    point = Point(None, None, Limit(0.5, 1, 1, 1), {"a": [run | {"seconds": 3, "first_token": 1}]})
    (row,) = offline_table(point, {"prompts": [prompt], "output_lens": [8]})
    assert (row["decode tok/s"], row["total tok/s"], row["of the limit"]) == ("3.5", "16.0", "17%")


def test_agreement_ends_at_the_first_difference() -> None:
    told = agreement([[1, 2, 3], [4, 5, 6], [7]], [[1, 2, 3], [4, 9, 6], [8]])
    assert told.startswith("2 of 3 first tokens, 4 of 7 ")


def test_ratios_are_of_runs_that_were_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    """The middle pair failed on one side. Medians of all runs would give 5 / 2."""
    ours = [{"seconds": s, "outputs": [[1]]} for s in (1.0, 2.0, 4.0)]
    theirs = [{"seconds": s, "outputs": [[1]]} for s in (2.0, 5.0, 12.0)]
    theirs[1] = {"failed": "no reason"}
    point = Point(None, None, Limit(1, 1, 1, 1), {"a": ours, "b": theirs})
    print_comparison(point, {"temperature": 0.6})
    assert capsys.readouterr().out == "a / b: 2.50 (2.00 to 3.00, pairs of runs: 2)\n"


@pytest.mark.size("full")
def test_all_engines_run_and_are_compared(
    tmp_path: Path, bench: Callable[..., tuple[int, str]]
) -> None:
    prompts, output_lens = draw_workload(4, (4, 12), (2, 6), vocab_size=2048)
    static, written = "nanoserve:batching=static", tmp_path / "report.json"
    engines = ["nanoserve", static, "transformers", "nanovllm"]
    options = ["--engine", ",".join(engines), "--hf-batch-size", "2"]
    options += ["--max-num-batched-tokens", "64", "--max-num-seqs", "3", "--max-model-len", "32"]
    status, shown = bench("--shape", "tiny", "--json", str(written), *options)
    assert status == 0, shown
    num_in, num_out = sum(map(len, prompts)), sum(output_lens)
    assert f"4 sequences, {num_in} prompt tokens, {num_out} output tokens" in shown
    lines = [line.split(" | ") for line in shown.splitlines() if line.startswith("| ")]
    rows = {cells[0].strip("| "): cells[1:] for cells in lines[1:]}
    assert rows.keys() == set(engines)
    assert rows.pop("nanovllm")[0] == "not installed: no package nanovllm"
    for output_speed, total_speed, seconds, *_ in rows.values():
        # Both speeds are of the tokens asked for, so both give the same time.
        assert abs(num_out / float(output_speed) - float(seconds)) < 0.05 * float(seconds) + 0.01
        ratio = float(total_speed) / float(output_speed)
        assert abs(ratio - (num_in + num_out) / num_out) < 0.05 * ratio
    for other in engines[1:-1]:
        assert re.search(rf"^nanoserve / {other}: \d+\.\d\d \(", shown, re.MULTILINE)
    assert "4 of 4 first tokens" in shown
    assert "KV blocks" in shown and "preemptions 0" in shown
    assert "max_model_len 32, max_num_batched_tokens 64, max_num_seqs 3" in shown
    assert re.search(r"^roofline: .* GB/s and .* TFLOP/s, in \d+ steps$", shown, re.M)
    report = json.loads(written.read_text())
    assert report["spec"]["model"] == "tiny" and report["spec"]["threads"] == 1
    assert str(tmp_path) not in written.read_text() and "scratch" not in report["spec"]
    assert report["spec"]["num_output_tokens"] == num_out
    (point,) = report["points"]
    assert point["runs"]["nanoserve"][0]["versions"]["nanoserve"]
    assert point["limit"]["seconds"] > 0


def test_an_engine_that_fails_is_reported(
    tmp_path: Path, bench: Callable[..., tuple[int, str]]
) -> None:
    make_qwen3(tmp_path, dtype="bfloat16")
    edit_json(tmp_path / "config.json", hidden_act="gelu")  # which nanoserve refuses
    nowhere = ["--engine", "nanoserve,vllm", "--python", f"vllm={tmp_path / 'no-such-python'}"]
    status, shown = bench("--model", str(tmp_path), *nowhere)
    assert status == 1
    assert "no roofline: hidden_act='gelu'" in shown
    assert "nanoserve FAILED: ValueError: hidden_act='gelu'" in shown
    assert re.search("vllm FAILED: .*no-such-python", shown)
    assert "| nanoserve | failed: ValueError: hidden_act='gelu'" in shown


def test_a_gguf_file(tmp_path: Path, bench: Callable[..., tuple[int, str]]) -> None:
    """transformers makes floats of it; nanoserve's limit is that of the bits in the file."""
    pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")
    from nanoserve.cli.bench.engines.gguf_file import write_gguf

    # Heads of 128: transformers does not ask the file.
    make_qwen3(tmp_path / "plain", hidden_size=64, intermediate_size=96, head_dim=128)
    write_gguf(tmp_path / "plain", tmp_path / "model.gguf", "Q8_0")
    assert 8.5 <= compare.stored_bits(tmp_path / "model.gguf") < 8.6
    assert compare.stored_bits(tmp_path) is None
    status, shown = bench("--model", str(tmp_path / "model.gguf"))
    assert status == 0 and "no roofline" not in shown
    assert "run 1, nanoserve: " in shown and "run 1, transformers: " in shown


def test_what_is_no_checkpoint() -> None:
    told = "--model nowhere is not a checkpoint: neither a GGUF file nor a folder with config.json"
    with pytest.raises(SystemExit, match=told):
        compare.main(["--model", "nowhere"])
