"""Each promise of SECURITY.md is kept by tests that exist."""

import re
from pathlib import Path

import nanoserve

ROOT = Path(nanoserve.__file__).parent.parent
POLICY = (ROOT / "SECURITY.md").read_text("utf-8")


def test_each_promise_names_tests_that_exist() -> None:
    (table,) = re.findall(r"\n\| for .*?\n\n", POLICY, re.DOTALL)
    promises = table.strip().splitlines()[2:]
    assert len(promises) >= 10
    for promise in promises:
        kept_by = re.findall(r"`(tests/\S+\.py)::(\w+)`", promise.split(" | ")[-1])
        assert kept_by, f"no test keeps: {promise}"
        for file, name in kept_by:
            source = (ROOT / file).read_text("utf-8")
            assert f"\ndef {name}(" in source, f"{file} has no {name}"


def test_the_readme_and_the_course_link_to_it() -> None:
    for page in ("README.md", "docs/index.md"):
        assert "SECURITY.md" in (ROOT / page).read_text("utf-8"), page
