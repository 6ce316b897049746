"""The page shows what a reader sees who runs its example."""

import json
from pathlib import Path

from . import worked

FOLDER = Path(__file__).parent


def test_the_answer_ends_by_itself_and_is_about_block_tables() -> None:
    text = worked.answer()
    assert text.splitlines()[-1] == "> stop"
    assert "block table" in text.lower()


def test_the_run_of_the_page_has_so_many_steps_and_tokens() -> None:
    run = (FOLDER / "first-run.jsonl").read_text("utf-8").splitlines()
    steps = [json.loads(line) for line in run if '"rows"' in line]
    assert len(steps) == worked.num_steps()
    assert steps[0]["rows"][0]["new"] == worked.num_prompt_tokens()


def test_sizes_and_options() -> None:
    assert 3 <= int(worked.megabytes("checkpoint/tiny_qwen3/model")) <= 8
    assert worked.options_table().count("\n") == 14
