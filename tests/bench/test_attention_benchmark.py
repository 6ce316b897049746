"""benchmarks/attention.py runs to its end, at sizes that the interpreter can do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


def test_it_prints_all_tables(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    file = tmp_path / "tables.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(file)]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert shown.returncode == 0, shown.stderr
    cells = [line.strip("| ").split(" | ") for line in shown.stdout.splitlines() if "|" in line]
    first, second = {row[0] for row in cells}, {row[1] for row in cells if len(row) > 1}
    assert "tiny" in first
    assert {"add_rms_norm", "act_and_mul", "store_kv", "choose_tokens"} <= second
    titles = ("Decode attention", "Prefill attention", "Small kernels")
    assert all(f"\n{title}" in shown.stdout for title in titles)
    rates = [float(row[-2]) for row in cells if row[0] == "tiny"]
    assert len(rates) == 8 and min(rates) >= 0
    assert {row[-1] for row in cells if row[0] == "tiny"} == {"-"}  # shares say nothing there
    tables = json.loads(file.read_text())["tables"]
    assert [title for title in titles if tables[title]] == list(titles)
    assert sum(map(len, tables.values())) == 8
    assert all(row["of a copy"] is None and row["us"] > 0 for row in tables["Small kernels"])
