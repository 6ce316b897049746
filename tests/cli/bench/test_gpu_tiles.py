"""benchmarks/prefill_tiles.py, kv_code_tiles.py and e4m3_products.py run, tiny."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import e4m3_products
import gpu_job
import kv_code_tiles
import prefill_tiles
import torch
import tune
from paged_rows import Shape, make_rows

from nanoserve.kernels.triton import paged_attention
from nanoserve.kernels.triton.tile_config import TileConfig

SHAPE = Shape("tiny", 2, 1, 16, 0, 0, 0)


def lines_of(
    script: Any, file: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> list[dict[str, Any]]:
    command = [script.__file__, "--device", "cpu", "--out", str(file), *options]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    return json.loads(file.read_text())


def test_products_of_e4m3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(e4m3_products, tmp_path / "lines.json", monkeypatch)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    *rows, _ = lines
    assert [row["M"] for row in rows] == [1, 16, 257]
    assert ["ours" in row for row in rows] == [True, False, True]
    for row in rows:
        for name in ("mm", "mm_fast", "bf16", *(["ours"] if row["M"] != 16 else [])):
            assert row[name]["us"] > 0 and row[name]["rms"] < 5e-3, row
    options = ("--no-ours", "--seconds", "-1")
    first, _ = lines_of(e4m3_products, tmp_path / "lines.json", monkeypatch, *options)
    assert first["stopped_before"] == [512, 64, 1]


@pytest.mark.size("full")
def test_tiles_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(prefill_tiles, tmp_path / "lines.json", monkeypatch, "--rounds", "1")
    first, *found, _ = lines
    assert first["fa3"] == "no GPU" and first["compiled"] == []
    variants = list(prefill_tiles.VARIANTS)
    assert [line["variant"] for line in found] == [*variants, *variants, "decode rows alone"]
    assert all(line["us"] > 0 and len(line["all_us"]) == 1 for line in found)
    assert [line["of_present"] for line in found if line["variant"] == variants[0]] == [1, 1]


@pytest.mark.size("full")
def test_tiles_of_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(kv_code_tiles, tmp_path / "lines.json", monkeypatch, "--rounds", "1")
    found = lines[1:-1]
    assert all(line["us"] > 0 for line in found)
    decode, chunk = kv_code_tiles.DECODE, kv_code_tiles.CHUNK
    wanted = [("bf16", "own"), *((kind, name) for kind in ("int8", "fp8") for name in decode)]
    wanted += [("bf16", "own"), *((kind, name) for kind in ("int8", "fp8") for name in chunk)]
    assert [(line["kind"], line["variant"]) for line in found] == wanted
    assert [line["of_bf16"] for line in found if line["kind"] == "bf16"] == [1, 1]


def test_a_variant_that_fails_or_differs_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lens = [(1, 9), (5, 20)]
    rows = make_rows(SHAPE, [n for _, n in lens], [n for n, _ in lens], 1, "cpu")
    flop = prefill_tiles.flop_of_chunks(lens, SHAPE)
    assert flop == 4 * 2 * 16 * (16 + 17 + 18 + 19 + 20)
    # A stand-in: what is checked is which rows it is given, and where its result goes.
    monkeypatch.setattr(prefill_tiles, "flash_attention", lambda rows, layer: rows.attend(layer))
    variants = {"first": TileConfig(16, 16, 4, 2), "no power of two": TileConfig(16, 17, 4, 2)}
    monkeypatch.setattr(prefill_tiles, "VARIANTS", variants)
    runs = prefill_tiles.runs_of("case", rows, flop, has_theirs=True)
    wrong = prefill_tiles.Run("case", "wrong", lambda: rows.attend(0) + 1, flop)
    right = prefill_tiles.same([*runs, wrong], gpu_job.Lines(None))
    names = ["first", "fa3 chunks, triton decode", "fa3 all", "decode rows alone"]
    assert [run.variant for run in right] == names
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["variant"] for line in told] == ["no power of two", "wrong"]
    assert "differs by" in told[1]["error"]


def test_why_there_is_no_flash_attention(tmp_path: Path) -> None:
    assert prefill_tiles.load_flash_attention(None) == "no --peers"
    assert "no _vllm_fa3_C*.so in" in str(prefill_tiles.load_flash_attention(tmp_path))
    (tmp_path / "_vllm_fa3_C.abi3.so").write_text("no library")
    assert "OSError" in str(prefill_tiles.load_flash_attention(tmp_path))


@pytest.mark.parametrize("is_decode", [True, False])
def test_only_one_of_the_kernels_has_the_tiles(is_decode: bool) -> None:
    config, rest = TileConfig(16, 32, 4, 2), (128, torch.bfloat16, 2)
    original = paged_attention.tile_config
    with tune.only(config, is_decode):
        assert paged_attention.tile_config(*rest, is_decode) is config
        assert paged_attention.tile_config(*rest, not is_decode) == original(*rest, not is_decode)
    with tune.only(None, is_decode):
        assert paged_attention.tile_config(*rest, is_decode) == original(*rest, is_decode)
    assert paged_attention.tile_config is original


def test_processes_end() -> None:
    assert gpu_job.Processes(sys.exit, [3, 0]).wait() == [3, 0]
    assert gpu_job.Processes(time.sleep, [60]).wait(0.1) == [None]
