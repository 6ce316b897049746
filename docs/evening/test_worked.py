"""The page shows the recorded run, and batches as their definitions say."""

from . import worked


def test_the_table_has_the_first_steps_each_new_block_and_the_last_step() -> None:
    lines = worked.steps_table().splitlines()[2:]
    assert lines[0].startswith("| 0 | 0 | 18 | [1, 2] |")
    assert lines[1].startswith("| 1 | 18 | 1 | [1, 2] |")
    assert lines[-1].endswith("| end of sequence |")
    tables = [line.split("|")[4].strip() for line in lines]
    assert tables[-1] == "[1, 2, 3, 4, 5]" and len(lines) == 3 + 3 + 1


def test_the_reading_path_has_files() -> None:
    assert worked.num_files() > 20


def test_batches_agree_with_the_definitions() -> None:
    for index, step in enumerate(worked.steps()):
        (row,) = step["rows"]
        batch, table = worked.batch_of(index), []
        for earlier in worked.steps()[: index + 1]:
            table += earlier["rows"][0]["blocks"]
        start, n = row["computed"], row["new"]
        positions = list(range(start, start + n))
        assert batch["positions"] == positions
        assert batch["slot_mapping"] == [table[p // 16] * 16 + p % 16 for p in positions]
        assert batch["context_lens"] == [start + n] and batch["cu_seqlens_q"] == [0, n]
        assert batch["output_rows"] == [n - 1] and len(batch["input_ids"]) == n
    assert worked.batch_of(1)["input_ids"] == [worked.steps()[0]["rows"][0]["token"]]
    assert worked.batch_table().count("\n") == 7
