"""Stage 7: several sequences in one forward pass, each at its own positions."""

import random

import pytest
import torch

from .stages import model, naive_logits, stage
from .your_engine import Batch, Pool, Row, Sequence, run


def differs(found: torch.Tensor, token_ids: list[int]) -> float:
    """Difference from the logits after these tokens, computed alone in one forward pass."""
    return float((found - naive_logits(token_ids)).abs().max())


def row(seq: Sequence, n: int) -> Row:
    return Row(seq, seq.num_computed, n, seq.num_computed + n == len(seq.token_ids))


@stage(7)
def test_a_batch_computed_by_hand() -> None:
    decodes = Sequence([3, 4, 5], num_computed=2, block_table=[2])
    ends = Sequence(list(range(10)), num_computed=7, block_table=[1, 6, 9])
    begins = Sequence([50, 51, 52], block_table=[4])
    rows = [row(decodes, 1), row(ends, 3), row(begins, 2)]
    batch = Batch(rows, Pool(model(), 10, 4))
    case = f"Batch of {rows}, blocks of 4"
    assert batch.input_ids.tolist() == [5, 7, 8, 9, 50, 51], case
    assert batch.positions.tolist() == [2, 7, 8, 9, 0, 1], case
    assert batch.slot_mapping.tolist() == [10, 27, 36, 37, 16, 17], case
    assert list(batch.cu_seqlens) == [0, 1, 4, 6], case
    assert list(batch.output_rows) == [0, 3], case


@stage(7)
def test_a_step_in_which_no_row_catches_up_has_no_logits() -> None:
    seq = Sequence([1, 2, 3, 4], block_table=[1])
    found = run(model(), Pool(model(), 2, 4), [row(seq, 2)])
    assert found.shape == (0, model().config["vocab_size"]), "two of four tokens"


@pytest.mark.parametrize("sharer_first", [False, True])
@stage(7)
def test_a_block_may_be_filled_and_read_in_one_step(sharer_first: bool) -> None:
    """One row has hits that another row computes in this step, before or after it."""
    begins = Sequence([*range(300, 333)], block_table=[9, 2, 7, 1, 12, 4, 11, 3, 10])
    shares = Sequence([*range(300, 332), 7], num_computed=32)
    shares.block_table = [*begins.block_table[:8], 5]
    rows = [row(shares, 1), row(begins, 33)] if sharer_first else [row(begins, 33), row(shares, 1)]
    case = f"run(model, Pool(model, 12, 4), {rows})"
    for each, found in zip(rows, run(model(), Pool(model(), 12, 4), rows), strict=True):
        difference = differs(found, each.seq.token_ids)
        assert difference < 1e-3, f"the row of {each.n} tokens is off by {difference} in {case}"


@pytest.mark.parametrize("seed", range(4))
@stage(7)
def test_sequences_do_not_affect_each_other(seed: int) -> None:
    """Random prompts in random chunks: each gets the same logits as alone."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4])
    pool, free = Pool(model(), 60, block_size), rng.sample(range(1, 61), 60)
    sequences = []
    for _ in range(3):
        tokens = [rng.randrange(2048) for _ in range(rng.randint(1, 15))]
        table = [free.pop() for _ in range(-(-len(tokens) // block_size))]
        sequences.append(Sequence(tokens, block_table=table))
    while left := [seq for seq in sequences if seq.num_computed < len(seq.token_ids)]:
        rng.shuffle(left)
        rows = [row(s, rng.randint(1, len(s.token_ids) - s.num_computed)) for s in left]
        case, logits = f"rows {rows}, blocks of {block_size}", run(model(), pool, rows)
        ending = [each for each in rows if each.catches_up]
        assert len(logits) == len(ending), case
        for each, found in zip(ending, logits, strict=True):
            assert differs(found, each.seq.token_ids) < 1e-3, f"{each.seq.token_ids} of {case}"
        for seq, _, n, _ in rows:
            seq.num_computed += n
    assert torch.equal(pool.gather(0, [0], 1)[0], torch.zeros_like(pool.gather(0, [0], 1)[0])), (
        "block 0 is not used"
    )
