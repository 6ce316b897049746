"""Shared by the tests of all stages: a model, and nanoserve's scheduler as the reference."""

import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler as OurScheduler
from nanoserve.engine.sequence import Sequence as OurSequence

from . import your_engine
from .compare import CHECKPOINT

QUESTION = "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n"
Arrival = tuple[int, list[int], int]  # the step before which it arrives, prompt, max_tokens


def stage(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test of this stage. If it fails because an earlier stage is missing, it says so."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except NotImplementedError as error:
                missing = re.fullmatch(r"stage (\d+)", str(error))
                if missing and int(missing[1]) < number:
                    message = f"finish stage {missing[1]} first: stage {number} needs it"
                    raise NotImplementedError(message) from error
                raise

        return wrapped

    return decorate


@cache
def model() -> your_engine.Model:
    return your_engine.Model(CHECKPOINT)


@cache
def naive_tokens(prompt: tuple[int, ...], num_new: int) -> list[int]:
    """The tokens that stage 1 generates."""
    return your_engine.generate(model(), list(prompt), num_new)


def naive_logits(token_ids: list[int]) -> torch.Tensor:
    """Logits of the last token, by a forward pass over all tokens."""
    positions = torch.arange(len(token_ids))
    hidden = model().forward(
        torch.tensor(token_ids), positions, lambda layer, q, k, v: your_engine.attention(q, k, v)
    )
    return model().logits(hidden[-1])


def token_of(request: int, length: int) -> int:
    """The token that a sequence "samples" without a model: few kinds, so that prefixes recur."""
    return (request * 7 + length * 3) % 11


def check_plans(options: dict[str, int], arrivals: list[Arrival], max_len: int = 60) -> int:
    """Compare your plans with nanoserve's, step by step; return the number of preemptions.

    Token 4 is EOS. A failure names the case as a call, which repeats it in a test of your own.
    """
    case = f"check_plans({options}, {arrivals}, {max_len})"
    yours = your_engine.Scheduler(your_engine.Config(**options))
    config = EngineConfig(
        "none",
        block_size=options["block_size"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["budget"],
        long_prefill_token_threshold=options.get("threshold", 0),
    )
    ours = OurScheduler(config, options["num_blocks"], max_len)
    numbers: dict[Any, int] = {}
    todo, num_steps = list(arrivals), 0
    while todo or ours.has_unfinished():
        while todo and todo[0][0] <= num_steps:
            _, prompt, max_tokens = todo.pop(0)
            number, eos = len(numbers) // 2, frozenset([4])
            longest = min(max_len, len(prompt) + max_tokens)
            seq = your_engine.Sequence(list(prompt), len(prompt), longest, eos)
            params = SamplingParams(max_tokens=max_tokens)
            other = OurSequence(str(number), list(prompt), params, max_len, eos, arrival=number)
            numbers |= {seq: number, other: number}
            yours.add(seq)
            ours.add(other)
        plan, expected = yours.schedule(), ours.schedule()
        # This is not a test module, so pytest shows no values: the messages must.
        found = [numbers[seq] for seq in plan.preempted]
        right = [numbers[seq] for seq in expected.preempted]
        where = f"step {num_steps}, preempted requests: yours {found}, right {right}; {case}"
        assert found == right, where
        found = [(numbers[row.seq], row.start, row.n) for row in plan.rows]
        right = [(numbers[row.seq], row.start, row.n) for row in expected.rows]
        where = f"step {num_steps}, rows (request, start, n): yours {found}, right {right}; {case}"
        assert found == right, where
        ours.commit(expected)
        tokens = [token_of(numbers[s.seq], len(s.seq.token_ids)) for s in expected.sampled]
        yours.update(plan, tokens)
        ours.update(expected, [[token] for token in tokens])
        num_steps += 1
    left = [numbers[seq] for seq in [*yours.waiting, *yours.running]]
    assert not left, f"all have ended, but yours still has requests {left}; {case}"
    return ours.num_preemptions
