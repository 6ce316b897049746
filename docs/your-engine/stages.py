"""Shared by the tests of all stages: a model, and nanoserve's scheduler as the reference."""

import random
import re
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from traceback import extract_tb
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


def where_raised(error: Exception) -> str:
    """What an exception is, and the last line of the reader's that it went through."""
    found = f"{type(error).__name__}: {error}"
    for frame in reversed(extract_tb(error.__traceback__)):
        file = Path(frame.filename).name
        if file.startswith(("your_", "solution")):
            return (
                f"{found}, raised by `{frame.line}` in {frame.name}, line {frame.lineno} of {file}"
            )
    return found


def stage(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test of this stage. If it fails because an earlier stage is missing, it says so.

    If your code raises an exception, the message has the line and the arguments of the test.
    """

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
            except AssertionError:
                raise
            except Exception as error:
                case = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
                about = test.__name__.removeprefix("test_").replace("_", " ")
                about += f" ({case})" if case else ""
                raise AssertionError(f"{where_raised(error)}; test: {about}") from error

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


def both_schedulers(
    options: dict[str, int], max_len: int, aging: int | None, is_async: bool
) -> tuple[Any, OurScheduler]:
    """Your scheduler and nanoserve's, with the same options and policy."""
    config = EngineConfig(
        "none",
        block_size=options["block_size"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["budget"],
        long_prefill_token_threshold=options.get("threshold", 0),
    )

    class ShortestFirst(OurScheduler):
        def order(self, seq: OurSequence) -> tuple[int, ...]:
            remaining = seq.max_num_tokens - seq.num_computed_tokens
            return (remaining + aging * seq.arrival, seq.arrival)

    yours = your_engine.Config(**options)
    if aging is None and not is_async:
        return your_engine.Scheduler(yours), OurScheduler(config, options["num_blocks"], max_len)
    from . import your_features

    if is_async:
        ours = OurScheduler(config, options["num_blocks"], max_len)
        return your_features.AsyncScheduler(yours), ours
    order = your_features.shortest_first(aging)
    ours = ShortestFirst(config, options["num_blocks"], max_len)
    return your_features.PolicyScheduler(yours, order), ours


def random_case(
    rng: random.Random, num_requests: int, longest_prompt: int
) -> tuple[dict[str, int], list[Arrival]]:
    """Return options and arrivals for `check_plans`; no sequence has more than 40 tokens."""
    max_num_seqs, block_size = rng.randint(2, 6), rng.randint(1, 4)
    alone = -(-40 // block_size)  # blocks of the longest sequence
    options = {"num_blocks": alone + rng.randint(0, alone), "block_size": block_size}
    options |= {"max_num_seqs": max_num_seqs, "threshold": rng.choice([0, 0, 1, 5])}
    options["budget"] = max_num_seqs + rng.choice([0, 1, 10, 40])
    steps = sorted(rng.randint(0, 2 * num_requests) for _ in range(num_requests))
    arrivals: list[Arrival] = []
    for at in steps:
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, longest_prompt))]
        arrivals.append((at, prompt, rng.randint(1, 40)))
    return options, arrivals


def check_plans(
    options: dict[str, int],
    arrivals: list[Arrival],
    max_len: int = 60,
    aging: int | None = None,
    is_async: bool = False,
) -> int:
    """Compare your plans with nanoserve's, step by step; return the number of preemptions.

    Token 4 is EOS. A failure names the case as a call, which repeats it in a test of your own.
    aging: compare the schedulers of stage 11. is_async: compare those of stage 13.
    """
    more = "" if aging is None and not is_async else f", {aging}, {is_async}"
    case = f"check_plans({options}, {arrivals}, {max_len}{more})"
    steps: list[int] = []
    try:
        return _check_plans(options, arrivals, max_len, aging, is_async, steps)
    except AssertionError as error:
        raise AssertionError(f"step {len(steps)}, {error}; {case}") from None
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(f"step {len(steps)}, {where_raised(error)}; {case}") from error


def _check_plans(
    options: dict[str, int],
    arrivals: list[Arrival],
    max_len: int,
    aging: int | None,
    is_async: bool,
    steps: list[int],
) -> int:
    yours, ours = both_schedulers(options, max_len, aging, is_async)
    numbers: dict[Any, int] = {}
    todo, in_flight = list(arrivals), None
    while todo or ours.has_unfinished():
        while todo and todo[0][0] <= len(steps):
            _, prompt, max_tokens = todo.pop(0)
            number, eos = len(numbers) // 2, frozenset([4])
            longest = min(max_len, len(prompt) + max_tokens)
            seq = your_engine.Sequence(list(prompt), len(prompt), longest, eos)
            params = SamplingParams(max_tokens=max_tokens)
            other = OurSequence(str(number), list(prompt), params, max_len, eos, arrival=number + 1)
            numbers |= {seq: number, other: number}
            yours.add(seq)
            ours.add(other)
        plan, expected = yours.schedule(), ours.schedule()
        # This is not a test module, so pytest shows no values: the messages must.
        found = [numbers[seq] for seq in plan.preempted]
        right = [numbers[seq] for seq in expected.preempted]
        assert found == right, f"preempted requests: yours {found}, right {right}"
        found = [(numbers[row.seq], row.start, row.n) for row in plan.rows]
        right = [(numbers[row.seq], row.start, row.n) for row in expected.rows]
        assert found == right, f"rows (request, start, n): yours {found}, right {right}"
        if not is_async:
            ours.commit(expected)
        done = in_flight if is_async else (plan, expected)
        if done:
            tokens = [token_of(numbers[s.seq], len(s.seq.token_ids)) for s in done[1].sampled]
            yours.update(done[0], tokens)
            ours.update(done[1], [[token] for token in tokens])
        if is_async:
            yours.commit(plan)
            ours.commit(expected)
            in_flight = plan, expected
        steps.append(len(right))
    left = [numbers[seq] for seq in [*yours.waiting, *yours.running]]
    assert not left, f"all have ended, but yours still has requests {left}"
    return ours.num_preemptions
