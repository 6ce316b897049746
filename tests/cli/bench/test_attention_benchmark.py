"""benchmarks/attention.py runs to its end, at sizes that the interpreter can do."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import attention


def test_it_prints_all_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tables.json"
    monkeypatch.setattr(sys, "argv", ["attention.py", "--device", "cpu", "--json", str(file)])
    attention.main()
    shown = capsys.readouterr().out
    cells = [line.strip("| ").split(" | ") for line in shown.splitlines() if "|" in line]
    first, second = {row[0] for row in cells}, {row[1] for row in cells if len(row) > 1}
    assert "tiny" in first
    assert {"add_rms_norm", "act_and_mul", "store_kv", "choose_tokens"} <= second
    titles = ("Decode attention", "Prefill attention", "Small kernels")
    assert all(f"\n{title}" in shown for title in titles)
    rates = [float(row[-2]) for row in cells if row[0] == "tiny"]
    assert len(rates) == 8 and min(rates) >= 0
    assert {row[-1] for row in cells if row[0] == "tiny"} == {"-"}  # shares say nothing there
    tables = json.loads(file.read_text())["tables"]
    assert [title for title in titles if tables[title]] == list(titles)
    assert sum(map(len, tables.values())) == 8
    assert all(row["of a copy"] is None and row["us"] > 0 for row in tables["Small kernels"])
