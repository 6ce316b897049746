"""benchmarks/starting.py: a process of its own tells what each part of its start took."""

from pathlib import Path

import pytest
from starting import PARTS, SCHEMES, measure, start

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.config import EngineConfig


def test_every_scheme_is_one_of_the_engines() -> None:
    for options in SCHEMES.values():
        EngineConfig("none", **options)


@pytest.mark.size("full")
def test_a_start_is_told_part_by_part(tmp_path: Path) -> None:
    model = bundled_checkpoint("tiny-qwen3")
    assert model is not None
    found = start(model, "bfloat16, attention of torch", tmp_path)
    assert [*found] == [*PARTS] and min(found.values()) > 0


def test_both_states_of_the_caches_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def pretend(model: Path, scheme: str, caches: Path) -> dict[str, float]:
        is_cold = not any(caches.iterdir())
        (caches / "product").touch()
        seen.append((scheme, is_cold))
        return dict(zip(PARTS, (1.0, 8.0 if is_cold else 2.0, 0.5), strict=True))

    monkeypatch.setattr("starting.start", pretend)
    measure(tmp_path, ["int8", "int4"], 2, tmp_path)
    assert seen == [("int8", True), ("int8", False), ("int4", True), ("int4", False)] * 2
    table = capsys.readouterr().out.splitlines()
    assert table[2] == "| int8 | cold | 1.00 | 8.00 | 0.50 | 9.50 | 9.50 - 9.50 |"
    assert table[-1] == "| int4 | warm | 1.00 | 2.00 | 0.50 | 3.50 | 3.50 - 3.50 |"
