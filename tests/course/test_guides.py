"""The Python blocks of each guide run as they stand there, one after the other."""

import os
import re
import sys
from pathlib import Path

import facts
import pytest

from nanoserve.checkpoint.formats.registry import FORMATS
from nanoserve.models.registry import MODELS
from nanoserve.sampling import stages
from nanoserve.worker.worker_functions import WORKER_FUNCTIONS

GUIDES = sorted((facts.DOCS / "guides").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
# By guide, the packages that its blocks need, and what each prints.
PACKAGES = {
    "serving": ["fastapi", "uvicorn"],
    "structured-output-and-tools": ["llguidance"],
    "tracing": ["prometheus_client"],
}
PRINTED = {
    "adding-a-feature": "8 8 4 1 1",
    "kv-offloading": "0 0 0 128",
    "offline": "my-request",
    "serving": "keys and values",
    "simulating": "None True",
    "speculative-decoding": "accepted",
    "structured-output-and-tools": '"city"',
    "tracing": "13 2 2",
}
# These start processes, or compile kernels for a minute where nothing is cached.
LONG = {"quantization", "scaling-out", "serving"}


def blocks(guide: Path) -> list[str]:
    return BLOCK.findall(guide.read_text("utf-8"))


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a guide registers or writes is gone afterwards."""
    for registry in (MODELS, FORMATS, WORKER_FUNCTIONS, stages.STAGES):
        monkeypatch.setattr(registry, "_entries", registry.entries())
    monkeypatch.setattr(stages, "_OWN", dict(stages._OWN))
    for module in ("no_even", "my_functions"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("PYTHONPATH", str(facts.ROOT), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(guide, id=guide.stem, marks=[pytest.mark.size("full")] * (guide.stem in LONG))
        for guide in GUIDES
        if blocks(guide)
    ],
)
def test_the_blocks_of_a_guide_run(guide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in PACKAGES.get(guide.stem, ()):
        pytest.importorskip(package)
    names = {"__name__": guide.stem}
    for block in blocks(guide):
        exec(compile(block, guide.name, "exec"), names)
    assert PRINTED.get(guide.stem, "") in capsys.readouterr().out


def test_a_guide_is_a_page() -> None:
    for guide in GUIDES:
        assert 40 <= len(guide.read_text("utf-8").splitlines()) <= 200, guide.name
