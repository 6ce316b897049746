"""examples/vision.py: images in front of the engine give the tokens of the whole model."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "examples" / "vision.py"


@pytest.fixture(scope="module")
def vision() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("vision_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.mark.size("full")
def test_the_script_runs_without_a_download() -> None:
    command = [sys.executable, str(SCRIPT)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.endswith("2 images encoded, 0 answers differ\n")
    assert "0 tokens cached" in shown.stdout and "12 tokens cached" in shown.stdout
    assert "images or sound are not supported" not in shown.stderr


@pytest.mark.small(options=[{"max_num_batched_tokens": 3, "max_num_seqs": 2}])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 3, "max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_answers_are_those_of_transformers(options: dict[str, Any], vision: ModuleType) -> None:
    assert vision.compare_tiny(6, **options) == 0


def test_the_comparison_can_fail(vision: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = vision.VisionTower.rows
    monkeypatch.setattr(vision.VisionTower, "rows", lambda *args: original(*args).flip(0))
    assert vision.compare_tiny(6) > 0


def test_placeholders_are_counted(vision: ModuleType, tmp_path: Path) -> None:
    assert vision.runs([9, 1, 9, 9, 2, 9], 9) == [(0, 1), (2, 2), (5, 1)]
    assert vision.runs([1], 9) == []
    vision.make_tiny(str(tmp_path))
    tower = vision.VisionTower(str(tmp_path))
    pixels = torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match="3 placeholders, the images 4 rows"):
        tower.prompt([1, 299, 299, 299, 2], pixels)
    masked = torch.ones(1, 32, 32, dtype=torch.bool)
    masked[:, :, 16:] = False
    assert not torch.equal(tower.rows(pixels, masked), tower.rows(pixels))
    assert tower.num_encoded == 2
