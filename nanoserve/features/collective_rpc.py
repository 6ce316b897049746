"""Call a registered function on every rank of an engine: see `LLM.collective_rpc`."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoserve.utils.checks import check_number, require, shown
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.worker_functions import WORKER_FUNCTIONS, call_function

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

_REGISTER = 'nanoserve.register_worker_function("name", "package.module:function") adds one'


@dataclass(frozen=True)
class FunctionCall:
    """A checked call, which may be pickled: its location was looked up where it was created.

    order: see `nanoserve.worker.worker_functions.call_function`. timeout: in seconds, or None.
    """

    name: str
    order: bytes
    timeout: float | None


def check_call(
    method: Any, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> FunctionCall:
    """Return the call. Raises `ValueError` for arguments that `LLM.collective_rpc` rejects."""
    names = WORKER_FUNCTIONS.names()
    require(
        isinstance(method, str) and method in names,
        f"method={shown(method)} must be the name of a registered function, one of {names}; "
        f"{_REGISTER}",
    )
    location = WORKER_FUNCTIONS.entry(method)
    require(isinstance(location, str), f"method={method!r} is registered without a location")
    if timeout is not None:
        timeout = check_number("timeout", timeout, 0, excludes_low=True)
    require(isinstance(args, (list, tuple)), f"args={shown(args)} must be a list or a tuple")
    kwargs = {} if kwargs is None else kwargs
    require(
        isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs),
        f"kwargs={shown(kwargs)} must be a dictionary with strings as keys, or None",
    )
    try:
        order = json.dumps([location, list(args), dict(kwargs)]).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"args={shown(args)} and kwargs={shown(kwargs)} must be serializable as JSON "
            f"({error}); pass the path of a file that has tensors"
        ) from None
    require(
        len(order) < 2**31,
        f"args and kwargs take {len(order)} bytes, of at most 2 GiB: pass the path of a file",
    )
    return FunctionCall(method, order, timeout)


def call_on_ranks(engine: "GuardedEngine", call: FunctionCall) -> list[Any]:
    """Call the function between two steps; return the results of all ranks, from rank 0 on.

    Raises `ValueError` for an engine that has no ranks now, `RuntimeError` inside a step and if the
    function fails on a rank, and `TimeoutError`.
    """
    if engine.is_stepping:
        raise RuntimeError("a function cannot be called on ranks inside a step: wait for its end")
    return engine.call_between_steps(partial(_call, engine, call))


def _call(engine: "GuardedEngine", call: FunctionCall) -> list[Any]:
    executor: Any = engine.executor
    refusal, has_one_rank = engine.refusal, isinstance(executor, ModelRunner)
    # A single rank that sleeps can answer; the processes of several have ended.
    is_there = refusal is None or (has_one_rank and refusal != "closed")
    require(is_there, f"this engine is {refusal}")
    start, num_ranks = time.monotonic(), 1
    if has_one_rank:
        answers = {0: call_function(call.order, executor)}
    else:
        answers = executor.call_function(call.order, call.timeout)
        num_ranks += len(executor.worker_pids)
    failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
    if failed:
        reasons = [f"rank {rank}: {error}" for rank, error in sorted(failed.items())]
        raise RuntimeError("\n".join([f"{call.name!r} has failed:", *reasons]))
    late = sorted(set(range(num_ranks)) - answers.keys())
    seconds = time.monotonic() - start
    if late or (call.timeout is not None and seconds > call.timeout):
        what = f"ranks {late} have not returned" if late else "all ranks have returned too late"
        raise TimeoutError(
            f"{call.name!r}, timeout={call.timeout}: {what} after {seconds:.3g} seconds; a "
            f"function is not interrupted, and its rank takes no step before its end"
        )
    return [answers[rank]["result"] for rank in range(num_ranks)]
