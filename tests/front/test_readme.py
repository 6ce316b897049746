"""What the README shows must run as it stands there."""

import json
import re
from pathlib import Path

import pytest
from smollm2 import require_smollm2

import nanoserve

README = Path(nanoserve.__file__).parent.parent / "README.md"


def run_example(number: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What it prints."""
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    exec(compile(examples[number], str(README), "exec"), {})
    return capsys.readouterr().out


def test_the_api_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_example(0, capsys)
    assert "A block table" in shown and "my-request" in shown


@pytest.mark.size("full")
def test_the_format_example_answers_by_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    require_smollm2()
    told = json.loads(run_example(1, capsys))
    assert {*told} == {"city", "days"} and told["days"] >= 1


def test_the_options_table_names_real_options_and_defaults() -> None:
    from nanoserve.config import EngineConfig

    defaults = EngineConfig("none")
    table = r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| ([^|]+) \|"
    rows = re.findall(table, README.read_text("utf-8"), re.M)
    assert len(rows) >= 10
    for names, shown in rows:
        for name in re.findall(r"\w+", names):
            value = getattr(defaults, name)
            if shown.strip() in (f"`{value}`", f'`"{value}"`', str(value), f"{value} (off)"):
                continue
            assert value is None or value == (), (name, shown, value)  # described in words
