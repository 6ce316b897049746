"""Functions of one's own that run on every rank."""

import os
import time
from typing import Any

import torch


def describe(runner: Any, *args: Any, **kwargs: Any) -> Any:
    return runner.context.parallel.global_rank, args, kwargs


def sum_over_ranks(runner: Any, value: float) -> float:
    return runner.context.tp.all_reduce(torch.tensor([value])).item()


def fail(runner: Any, rank: int) -> None:
    if runner.context.parallel.global_rank == rank:
        raise LookupError("no such thing on this rank")


def end_process(runner: Any, rank: int) -> None:
    if runner.context.parallel.global_rank == rank:
        os._exit(7)


def wait(runner: Any, rank: int, seconds: float) -> int:
    if runner.context.parallel.global_rank == rank:
        time.sleep(seconds)
    return rank


def model(runner: Any) -> Any:
    return runner.model
