"""Your own features: stages 11 to 13, each on top of the finished `your_engine.py`.

They are optional and need stages 1 to 9, but not each other. No line of your engine has to change,
except that a feature may need a method where you wrote a few lines inside another: then move these
lines into a method of their own. Test a stage with `pytest -x docs/your-engine/test_stage_11.py`,
and so on. What is imported here is all that the solution imports.
"""

# ruff: noqa: F401  (imports that only the finished stages use)
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from .your_engine import BlockManager, Config, Engine, Plan, Row, Scheduler, Sequence, draw, run

# -- Stage 11: a policy of your own (chapters 6 and 7) -------------------------------------------

# Given: an order returns the sort key of a sequence. The lowest is admitted first and preempted
# last. All keys differ, and a key does not change while its sequence waits.
Order = Callable[[Sequence], tuple[int, ...]]


def shortest_first(aging: int) -> Order:
    """The order of the shortest remaining work, in tokens, in which later arrivals are longer.

    The key of a sequence is (remaining + aging x arrival, arrival). What remains is all that is not
    computed of the longest that the sequence may become, `max_len` tokens. The term with `aging`
    keeps a long sequence from waiting forever: of those that arrive k later, only one that is more
    than aging x k tokens shorter is admitted before it.
    """
    raise NotImplementedError("stage 11")


class PolicyScheduler(Scheduler):
    """Admits sequences in the order of a policy, and preempts the last in this order.

    The tests give it to your engine by `engine.scheduler = PolicyScheduler(config, order)`.
    """

    def __init__(self, config: Config, order: Order) -> None:
        raise NotImplementedError("stage 11")

    def add(self, seq: Sequence) -> None:
        """Number the sequence, `seq.arrival`, from 1 on, and queue it in its place in `waiting`.

        The head of `waiting` is the one with the lowest key, so `schedule` can stay as it is.
        """
        raise NotImplementedError("stage 11")

    def make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        """Allocate blocks for `n` more tokens of a running sequence, as in stage 6.

        The victim is the running sequence with the highest key. It goes back to its place in
        `waiting`, with the key that it has then. It may have a row in `plan` already: the row is
        removed, and its tokens return to the budget.
        """
        raise NotImplementedError("stage 11")


# -- Stage 12: KV offload (chapters 7 and 25) ----------------------------------------------------

HOST = 0  # Given: among the hits of `lookup`, a block that is in the host pool.


class HostPool:
    """Contents of evicted blocks by their chain hash, at most `num_blocks` of them.

    If there are too many, the one that was put longest ago is dropped.
    """

    def __init__(self, num_blocks: int) -> None:
        raise NotImplementedError("stage 12")

    def __contains__(self, block_hash: bytes) -> bool:
        raise NotImplementedError("stage 12")

    def get(self, block_hash: bytes) -> Any:
        """The content that was put under this hash; changes nothing."""
        raise NotImplementedError("stage 12")

    def put(self, block_hash: bytes, content: Any) -> None:
        """Keep a content, as the last to be dropped; also if the hash is there already."""
        raise NotImplementedError("stage 12")


class OffloadManager(BlockManager):
    """A block manager whose evicted blocks go to the host pool, and come back for a hit.

    `read(block)` returns the content of a block, a copy, and `write(block, content)` restores it.
    Both are called while a step is planned; the model runs afterwards. Never read a block whose
    content the host pool has already.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host: HostPool,
        read: Callable[[int], Any],
        write: Callable[[int, Any], None],
    ) -> None:
        raise NotImplementedError("stage 12")

    def lookup(self, seq: Sequence) -> list[int]:
        """The hits of stage 4, and then `HOST` for each of the following that the host pool has.

        Never the last token: it must be computed. Changes only `seq.hashes`.
        """
        raise NotImplementedError("stage 12")

    def allocate(self, seq: Sequence, num_tokens: int, hits: Collection[int] = ()) -> bool:
        """As in stage 4, where a hit that is `HOST` gets a new block.

        The content is written into it; `cache` is called next, as for a computed block. False, and
        no change at all, if there are too few blocks.

        A cached block that is taken for other content is put into the host pool, unless another
        block has the same hash. What this displaces there may be a hit of this very call.
        """
        raise NotImplementedError("stage 12")


class OffloadEngine(Engine):
    """An engine whose scheduler has an `OffloadManager` over the engine's pool."""

    def __init__(self, folder: Path, config: Config, host_blocks: int) -> None:
        raise NotImplementedError("stage 12")


# -- Stage 13: async scheduling (chapter 17) -----------------------------------------------------

PENDING = -1  # Given: at the end of `token_ids`, in place of a token that a step will yield.


class AsyncScheduler(Scheduler):
    """Plans a step before the tokens of the step before are known.

    The calls are schedule, update (with the tokens of the step before), commit, and again. So a
    sequence whose last token is not known has `PENDING` in its place when the next step is planned:
    its length is right, and its id is of no importance, except that

    - a block that ends with a pending token has no hash yet: it is cached in `commit`;
    - a preempted or finished sequence has no pending token: its last known token is its last;
    - a sequence that will have `max_len` tokens with its pending one is not planned again.
    """

    def __init__(self, config: Config) -> None:
        raise NotImplementedError("stage 13")

    def commit(self, plan: Plan) -> None:
        """Count the progress of a step that was launched; `update` no longer does it.

        For each row whose sequence has not ended: its tokens are computed, the blocks that they
        fill are cached, and if the row catches up, a pending token is appended.
        """
        raise NotImplementedError("stage 13")

    def update(self, plan: Plan, token_ids: list[int]) -> None:
        """Process the tokens of a step, as in stage 5: each takes the place of its pending one.

        A sequence that was preempted in the meantime gets its token, too, and waits with it. The
        token of one that has ended in the meantime is discarded.
        """
        raise NotImplementedError("stage 13")


class AsyncEngine(Engine):
    """An engine whose model computes a step while the next one is planned.

    A thread is the device (`ThreadPoolExecutor(1)`): it runs one step after the other, in order,
    model and sampling. It knows the pending tokens: they are those that it sampled in the step
    before. Whatever it reads of a sequence must be a copy (`dataclasses.replace`) made when the
    step is launched, since the loop changes sequences in the meantime.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        raise NotImplementedError("stage 13")

    def step(self) -> dict[Sequence, str]:
        """Plan a step and launch it; then wait for the step before, and return its new text.

        {} if there was nothing to wait for, as in the first call. `abort` may come between any two
        calls: what the device still computes for the sequence is discarded.
        """
        raise NotImplementedError("stage 13")
