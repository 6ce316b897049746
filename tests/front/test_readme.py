"""What the README shows must run as it stands there."""

import re
from pathlib import Path

import nanoserve

README = Path(nanoserve.__file__).parent.parent / "README.md"


def test_the_api_example_runs(capsys) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    shown = capsys.readouterr().out
    assert "A block table" in shown and "my-request" in shown


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
