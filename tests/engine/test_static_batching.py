"""The book's two worked traces: what continuous batching saves, in the engine's own steps.

Three slots, prompts of one token, so that n output tokens take n steps. No model is run.
"""

import pytest
from child import in_static_batches
from counting_executor import make_engine, run

from nanoserve import SamplingParams

Span = tuple[int, int]

# Output lengths; with continuous and with static batching, after which step each request begins
# and after which it is done.
TRACES = {
    "first": (
        [10, 50, 100, 40, 30],
        [(0, 10), (0, 50), (0, 100), (10, 50), (50, 80)],
        [(0, 10), (0, 50), (0, 100), (100, 140), (100, 130)],
    ),
    # The text beside the book's second picture lets the fourth one begin 50 steps later.
    "second": (
        [50, 100, 200, 50, 80, 150],
        [(0, 50), (0, 100), (0, 200), (50, 100), (100, 180), (100, 250)],
        [(0, 50), (0, 100), (0, 200), (200, 250), (200, 280), (200, 350)],
    ),
}


def spans(output_lens: list[int], static: bool) -> list[Span]:
    """Of each request: steps before its first one, and steps up to its last one."""
    engine, steps, ids = make_engine(max_num_seqs=3), [], iter(range(len(output_lens)))
    engine.observers.append(
        lambda plan, *_: steps.append({row.seq.request_id for row in plan.rows})
    )

    def generate(prompts: list[list[int]], lens: list[int]) -> list[list[int]]:
        names = [str(next(ids)) for _ in prompts]
        for name, prompt, n in zip(names, prompts, lens, strict=True):
            engine.add_request(name, prompt, SamplingParams(max_tokens=n, temperature=0))
        finished = run(engine)
        return [finished[name].outputs[0].token_ids for name in names]

    chosen = in_static_batches(generate, 3) if static else generate
    outputs = chosen([[7]] * len(output_lens), output_lens)
    assert [len(tokens) for tokens in outputs] == output_lens
    own_steps = [
        [number for number, ids in enumerate(steps) if str(i) in ids]
        for i in range(len(output_lens))
    ]
    return [(numbers[0], numbers[-1] + 1) for numbers in own_steps]


@pytest.mark.parametrize("trace", TRACES)
def test_a_request_takes_the_slot_that_another_leaves(trace: str) -> None:
    output_lens, continuous, _ = TRACES[trace]
    assert spans(output_lens, static=False) == continuous


@pytest.mark.parametrize("trace", TRACES)
def test_a_static_batch_waits_for_its_longest_request(trace: str) -> None:
    output_lens, _, static = TRACES[trace]
    found = spans(output_lens, static=True)
    assert found == static
    end = max(done for _, done in found[:3])
    idle = [end - done for _, done in found[:3]]
    assert idle == ([90, 50, 0] if trace == "first" else [150, 100, 0])


@pytest.mark.parametrize(("trace", "ratio"), [("first", 140 / 100), ("second", 350 / 250)])
def test_continuous_batching_needs_fewer_steps(trace: str, ratio: float) -> None:
    ends = [max(done for _, done in spans(TRACES[trace][0], static)) for static in (True, False)]
    assert ends[0] / ends[1] == ratio
