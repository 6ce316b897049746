"""The numbers in the answers to the course's questions, against a calculation by hand."""

import re
from pathlib import Path

import facts
import pytest

from . import worked

ROOT = Path(__file__).parents[2]


def test_parameters_of_7b_and_their_shares() -> None:
    """Shares: 64.2, 31.9, 3.9 and 0.004 per cent of 6,738,415,616."""
    counts = worked.parameters_7b()
    assert sum(counts.values()) == 6_738_415_616
    assert counts["feed-forward"] == 32 * 135_266_304
    assert counts["attention"] == 32 * 67_108_864
    shares = {part: worked.share_7b(part) for part in counts}
    assert shares["feed-forward"] == pytest.approx(64.2, abs=0.05)
    assert shares["attention"] == pytest.approx(31.9, abs=0.05)
    assert shares["embedding and head"] == pytest.approx(3.9, abs=0.05)
    assert shares["norms"] == pytest.approx(0.004, abs=0.0005)
    assert worked.weight_bytes_7b() == 13_476_831_232
    tensor_parallel = facts.load(facts.DOCS / "14-tensor-parallel/worked.py")
    assert tensor_parallel.llama_2_70b() == worked.PARAMETERS_70B


def test_what_fits_beside_the_weights() -> None:
    """(21.6 - 13.476831232 - 1) GB / 524,288; 70B in int8: (72 - 68.976648192 - 2) / 327,680."""
    per_token = worked.kv_bytes_per_token(32, 32, 128)
    assert per_token == 524_288
    assert worked.tokens_that_fit(24, 0.9, worked.weight_bytes_7b(), 1, per_token) == 13_586
    grouped = worked.kv_bytes_per_token(80, 8, 128)
    assert grouped == 327_680
    assert worked.tokens_that_fit(80, 0.9, worked.weight_bytes_70b(), 2, grouped) == 0
    assert worked.tokens_that_fit(80, 0.9, worked.weight_bytes_70b(1), 2, grouped) == 3_123
    # 72 - 34.488324096 - 2 = 35.511675904
    assert worked.tokens_that_fit(80, 0.9, worked.weight_bytes_70b(0.5), 2, grouped) == 108_373


def test_decode_waits_for_memory() -> None:
    """13.48 GB at 2 TB/s; 2 x 6.738e9 operations at 312 TFLOP/s: 0.043 ms, 156 times less."""
    read = worked.read_ms(worked.weight_bytes_7b(), 2e12)
    compute = worked.compute_ms(6_738_415_616, 312e12)
    assert read == pytest.approx(6.738, abs=1e-3)
    assert compute == pytest.approx(0.0432, abs=1e-4)
    assert worked.rows_to_balance(312e12, 2e12) == pytest.approx(156)
    assert read / compute == pytest.approx(156)


def test_waste_and_reuse() -> None:
    """50 of 64 slots; 100 of 112; a prompt of 100 tokens has 99 that may be reused, 6 blocks."""
    assert worked.reserved_waste(50, 4096) == pytest.approx(98.78, abs=0.01)
    assert worked.paged_waste(50, 16) == 21.875
    assert worked.paged_waste(100, 16) == pytest.approx(10.71, abs=0.01)
    assert [worked.expected_waste(size) for size in (1, 16, 256)] == [0, 7.5, 127.5]
    assert [worked.reusable(100, size) for size in (1, 16, 256)] == [99, 96, 0]
    assert (worked.reusable(64, 16), worked.reusable(5, 16)) == (48, 0)
    assert "| 16 | 7.5 | 96 | 256 |" in worked.block_size_table(100, 4096)


def test_scores_without_a_scale() -> None:
    assert worked.score_spread(128) == pytest.approx(11.3137, abs=1e-4)
    assert worked.larger_weight(1) == pytest.approx(0.7311, abs=1e-4)
    assert worked.larger_weight(worked.score_spread(128)) > 0.99998


def test_the_rest() -> None:
    assert worked.saved_by_grouping(64, 8) == 87.5
    assert worked.chunked_steps(1000, 256) == [256, 256, 256, 232]
    assert worked.chunked_steps(512, 256) == [256, 256]


def test_all_27_questions_are_answered_folded_and_with_a_link() -> None:
    page = (ROOT / "docs/questions/index.md").read_text(encoding="utf-8")
    answers = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    assert len(answers) == 27
    for answer in answers:
        question, folded = answer.splitlines()[0], answer.split("<details markdown>")
        assert len(folded) == 2 and not folded[0].removeprefix(question).strip(), question
        assert re.search(r"\]\(\.\./\d\d-", answer), question
