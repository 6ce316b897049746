"""benchmarks/gpu_peers.py measures one engine in its own process; pack_peers.py sets peers up."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import gpu_peers
import pack_peers
import pytest


def run(out: Path, *options: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, gpu_peers.__file__, "--tiny", "--models", str(out.parent / "models")]
    done = subprocess.run([*command, "--out", str(out), *options], capture_output=True, text=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.stdout.splitlines() == out.read_text().splitlines(), done.stderr
    return done.returncode, lines


@pytest.mark.size("full")
def test_an_engine_runs_the_workload(tmp_path: Path) -> None:
    options = ("--engine", "nanoserve", "--options", '{"enforce_eager": true}', "--label", "eager")
    rc, lines = run(tmp_path / "lines.jsonl", *options)
    assert rc == 0
    what = ["start", "warm-up", "workload", "workload", "few rows", "few rows", "end"]
    assert [line["what"] for line in lines] == what
    assert {line["label"] for line in lines} == {"eager"}
    assert lines[0]["options"] == {"enforce_eager": True}


def test_an_engine_ends_at_the_limit(tmp_path: Path) -> None:
    rc, lines = run(tmp_path / "lines.jsonl", "--engine", "nanoserve", "--limit", "0.05")
    assert rc == gpu_peers.TIMED_OUT
    assert [line["what"] for line in lines] == ["stopped"]


def test_an_engine_that_fails_is_told(tmp_path: Path) -> None:
    options = ("--engine", "vllm", "--peers", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")  # found before any other
    rc, lines = run(tmp_path / "lines.jsonl", *options)
    assert rc == 7
    assert [(line["what"], line["rc"]) for line in lines] == [("failed", 7)]


def test_where_peers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    for engine, folders in {
        "vllm": ["/peers", "before"],
        "nano-vllm": ["/peers/nano", "/peers", "before"],
        "nanoserve": [str(gpu_peers.ROOT), "before"],
    }.items():
        args = gpu_peers.parse_args(["--engine", engine, "--peers", "/peers"])
        assert gpu_peers.environment(args)["PYTHONPATH"].split(os.pathsep) == folders


@pytest.mark.size("full")
def test_weights_are_those_of_the_model(tmp_path: Path) -> None:
    from nanoserve import LLM, SamplingParams

    options = ["--prepare", "--tiny", "--models", str(tmp_path)]
    assert gpu_peers.main(options) == 0
    folder = tmp_path / "tiny-weights"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    with LLM(str(folder), attention_backend="torch", dtype="float32", num_kv_blocks=50) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert gpu_peers.main(options) == 0  # what is there stays
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_the_workload_is_nano_vllms() -> None:
    prompts, output_lens = gpu_peers.workload(is_tiny=False)
    assert len(prompts) == 256 and sum(output_lens) == 133_966
    shifted = gpu_peers.other(prompts[:1], 1, is_tiny=False)
    assert len(shifted[0]) == len(prompts[0]) and shifted[0] != prompts[0]


def test_peers_are_set_up(tmp_path: Path) -> None:
    """Unpacked side by side, once, with what vLLM wants to know about the model."""
    tree, out, dest = (tmp_path / name for name in ("tree", "out", "peers"))
    model = tree / "vllm/model_executor/models/qwen3.py"
    for file in (model, tree / "nano/nanovllm.py"):
        file.parent.mkdir(parents=True)
        file.write_text("x = 1\n")
    out.mkdir()
    for name in ("vllm", "nano"):
        with tarfile.open(out / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(tree / name, name)
    pack_peers.write_setup(tree, out)
    python = Path(sys.executable).parent
    environment = {"HOME": str(tmp_path), "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(out / "setup.sh"), str(dest)]
    for _ in range(2):
        subprocess.run(command, check=True, env=environment)
    assert (dest / model.relative_to(tree)).is_file() and (dest / "nano/nanovllm.py").is_file()
    assert list(dest.rglob("qwen3.*.pyc"))
    [info] = (tmp_path / ".cache/vllm/modelinfos").iterdir()
    found = json.loads(info.read_text())
    assert found["hash"] == hashlib.md5(b"x = 1\n", usedforsecurity=False).hexdigest()
    assert info.name == "vllm-model_executor-models-qwen3-Qwen3ForCausalLM.json"
    assert found["modelinfo"]["architecture"] == "Qwen3ForCausalLM"
