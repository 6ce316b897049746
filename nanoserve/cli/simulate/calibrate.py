"""Measure the steps of a real engine over the range of their sizes, to fit a step time to them.

A fit knows nothing of sizes that it has not seen: if all prompts were short, the coefficient of
query-key pairs is little more than noise, and a long prompt is predicted by it. So the steps that
are measured here are chosen and not those of a workload: prompts of any length, from a few tokens
to the longest, in waves of one request up to twice as many as there are slots. Outputs of a wave
end one after the other, so there are steps of every number of rows, with long and short contexts,
and in the last wave prompts are admitted one by one beside rows that decode.
"""

import time
from collections.abc import Callable, Iterator
from random import Random

from nanoserve.cli.simulate.fit import MeasuredStep
from nanoserve.cli.simulate.real import serve_for_real
from nanoserve.cli.simulate.traffic import Workload
from nanoserve.engine.guard import GuardedEngine
from nanoserve.utils.checks import check_int, require

_SHORTEST = 8  # tokens of a prompt
_OUTPUTS = (4, 40)  # tokens


def measure_steps(
    engine: GuardedEngine,
    longest: int = 1024,
    repeats: int = 3,
    seed: int = 0,
    wait: Callable[[float], None] = time.sleep,
) -> list[MeasuredStep]:
    """Return the sizes and times of steps for `fit_step_time`.

    The engine must be idle; its prefix cache is emptied. `longest` is the number of tokens of the
    longest prompts; choose it as long as those that you simulate. `wait` passes seconds of the
    engine's clock (`serve_for_real`). Raises `ValueError` if the engine has no room for them.
    """
    check_int("longest", longest, _SHORTEST)
    check_int("repeats", repeats, 1)
    room = engine.executor.max_model_len - _OUTPUTS[1]
    require(
        longest <= room,
        f"{longest=} leaves no room for {_OUTPUTS[1]} output tokens in max_model_len="
        f"{engine.executor.max_model_len}: it must be at most {room}",
    )
    engine.reset_prefix_cache()
    slots, vocab_size = engine.config.max_num_seqs, engine.input_processor.vocab_size - 1
    steps: list[MeasuredStep] = []
    for wave in calibration_waves(slots, longest, vocab_size, repeats, seed):
        steps += serve_for_real(engine, wave, wait).steps
    return steps


def calibration_waves(
    num_slots: int, longest: int, vocab_size: int, repeats: int = 1, seed: int = 0
) -> Iterator[Workload]:
    """Yield waves of 1, 2, 4, ... and 2 `num_slots` requests at once, all of them `repeats` times.

    Lengths of prompts are log-uniform, so that each order of magnitude is seen equally often, and
    the first prompt of a wave has `longest` tokens.
    """
    rng = Random(seed)
    numbers = [2**power for power in range((num_slots - 1).bit_length())] + [2 * num_slots]
    for number in numbers * repeats:
        drawn = (_SHORTEST * (longest / _SHORTEST) ** rng.random() for _ in range(number - 1))
        lengths = [longest, *(round(length) for length in drawn)]
        prompts = [rng.choices(range(vocab_size), k=length) for length in lengths]
        outputs = [rng.randint(*_OUTPUTS) for _ in range(number)]
        yield Workload(prompts, outputs, None, seed, vocab_size)
