"""The gated delta rule and the convolution before it, against transformers and in any chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.recurrent_state import RecurrentStateSpec
from nanoserve.models.layers.causal_conv import causal_conv
from nanoserve.models.layers.delta_rule import (
    Chunks,
    DeltaInputs,
    chunked_delta_rule,
    recurrent_delta_rule,
    unit_length,
)

HEADS, KEY, VALUE = 3, 8, 5
LENGTHS = [1, 2, 63, 64, 65, 130, 7]
CPU = torch.device("cpu")


def inputs(num_tokens: int, seed: int = 0) -> DeltaInputs:
    """Of a packed batch: some heads forget nearly all at once, some nearly nothing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, HEADS, *shape, generator=generator)

    rates = torch.tensor([1e-3, 1.0, 30.0])
    return DeltaInputs(
        unit_length(normal(KEY)) * KEY**-0.5,
        unit_length(normal(KEY)),
        normal(VALUE),
        -rates * normal().abs(),
        normal().sigmoid(),
    )


def row(packed: DeltaInputs, first: int, end: int) -> DeltaInputs:
    return DeltaInputs(*(x.unsqueeze(0) for x in packed.tokens(first, end)))


def of_transformers(rule, packed: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = row(packed, 0, len(packed.q))
    scaled = q * KEY**0.5  # its rule divides by this itself
    out, last = rule(
        scaled, k, v, g=g, beta=beta, initial_state=state[None], output_final_state=True
    )
    return out[0], last[0]


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_both_forms_are_those_of_transformers(rule) -> None:
    packed, before = inputs(130), torch.randn(HEADS, KEY, VALUE)
    expected, last = of_transformers(rule, packed, before)
    state = before[None].clone()
    out = recurrent_delta_rule(row(packed, 0, 130), state)[0]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(state[0], last, atol=1e-5, rtol=0)
    state = before[None].clone()
    out = chunked_delta_rule(packed, state, Chunks.of([130], CPU))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(state[0], last, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [64, 5, 1])
def test_packed_rows_are_those_computed_one_by_one(size: int) -> None:
    packed, before = inputs(sum(LENGTHS)), torch.randn(len(LENGTHS), HEADS, KEY, VALUE)
    state, first = before.clone(), 0
    out = chunked_delta_rule(packed, state, Chunks.of(LENGTHS, CPU, size))
    for index, length in enumerate(LENGTHS):
        own = before[index : index + 1].clone()
        expected = recurrent_delta_rule(row(packed, first, first + length), own)[0]
        torch.testing.assert_close(out[first : first + length], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(state[index], own[0], atol=1e-5, rtol=0)
        first += length


@pytest.mark.parametrize("step", [1, 7, 64, 100])
def test_the_state_after_any_steps_is_that_of_one_pass(step: int) -> None:
    packed, state = inputs(300), torch.zeros(1, HEADS, KEY, VALUE)
    whole = state.clone()
    expected = chunked_delta_rule(packed, whole, Chunks.of([300], CPU))
    parts = []
    for first in range(0, 300, step):
        part = packed.tokens(first, min(first + step, 300))
        parts.append(chunked_delta_rule(part, state, Chunks.of([len(part.q)], CPU)))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(state, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sudden", [5.0, 100.0, 1000.0])
def test_tokens_that_forget_all_between_others_that_forget_nothing(sudden: float) -> None:
    packed = inputs(300)
    is_sudden = torch.rand(packed.g.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    packed = packed._replace(g=torch.where(is_sudden, -sudden, -0.01))
    exact = torch.zeros(1, HEADS, KEY, VALUE, dtype=torch.float64)
    in_float64 = DeltaInputs(*(x.double() for x in packed))
    expected = recurrent_delta_rule(row(in_float64, 0, 300), exact)[0]
    state = torch.zeros(1, HEADS, KEY, VALUE)
    out = chunked_delta_rule(packed, state, Chunks.of([300], CPU))
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(state.double(), exact, atol=2e-6, rtol=0)


def metadata(lengths: list[int], starts: list[int], slots: list[int]) -> AttentionMetadata:
    """Of rows that are not dummies: their tokens do not lie in block 0."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([s + torch.arange(n) for s, n in zip(starts, lengths, strict=True)])
    return AttentionMetadata(
        positions=positions.int(),
        slot_mapping=positions.int() + 100,
        cu_seqlens_q=ends.int(),
        context_lens=torch.tensor(starts).int() + torch.tensor(lengths).int(),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32),
        num_decode_rows=lengths.count(1),
        max_query_len=max(lengths),
        max_context_len=max(lengths),
        row_slots=torch.tensor(slots, dtype=torch.int32),
    )


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("step", [1, 2, 5, 23])
def test_a_convolution_in_steps_is_that_of_transformers(kernel: int, step: int) -> None:
    """Of two sequences, whose steps are packed and cut differently."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 23, 6), torch.randn(6, kernel)
    expected = causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)
    state, found = torch.zeros(2, kernel - 1, 6), [[], []]
    at = [0, 0]
    while min(at) < 23:
        rows = [i for i in (1, 0) if at[i] < 23]  # the second one takes one token more
        counts = [min(step + i, 23 - at[i]) for i in rows]
        new = torch.cat([x[i, at[i] : at[i] + n] for i, n in zip(rows, counts, strict=True)])
        step_of = metadata(counts, [at[i] for i in rows], rows)
        out, state[rows] = causal_conv(new, weight, state[rows], step_of)
        for i, part in zip(rows, out.split(counts), strict=True):
            found[i].append(part)
            at[i] += len(part)
    ours = torch.stack([torch.cat(parts) for parts in found])
    torch.testing.assert_close(F.silu(ours), expected, atol=1e-5, rtol=0)


def test_states_are_found_by_slot_and_cleared_at_position_0() -> None:
    state = RecurrentStateSpec(0, {"sum": (2,)}).allocate(num_slots=4)
    state.fill_(torch.nan)  # of a sequence that was there before
    step = metadata([2, 1], [0, 0], [2, 0])
    assert state.load("sum", step).tolist() == [[0, 0], [0, 0]]
    state.store("sum", step, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    again = metadata([1, 1, 3], [1, 0, 2], [0, 1, 2])
    assert state.load("sum", again).tolist() == [[3, 4], [0, 0], [1, 2]]


def test_dummy_rows_touch_no_slot() -> None:
    state = RecurrentStateSpec(0, {"sum": (1,)}).allocate(num_slots=3)
    state.fill_(7.0)
    step = metadata([1, 1, 1], [5, 0, 0], [0, 0, 0])
    step.slot_mapping = torch.tensor([100, 0, 0], dtype=torch.int32)
    state.store("sum", step, torch.tensor([[1.0], [2.0], [3.0]]))
    assert state.states["sum"][:2].flatten().tolist() == [1, 7]


def test_bytes_of_a_slot() -> None:
    spec = RecurrentStateSpec(0, {"conv": (3, 96), "recurrent": (4, 8, 12)})
    assert spec.bytes_per_slot == 4 * (3 * 96 + 4 * 8 * 12)
    assert sum(x.nbytes for x in spec.allocate(5).states.values()) == 5 * spec.bytes_per_slot
