"""The exercise of chapter 25, against the engine's own scheduler and block manager."""

import random
from collections import deque

import pytest

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence

from .exercise import DecodeSide


def test_one_request_is_sent_admitted_and_ends() -> None:
    side = DecodeSide(num_blocks=10, block_size=16, max_num_seqs=2)
    side.computed("a", 40)  # a prompt of 39: two full blocks, and 8 tokens after them
    assert side.start_transfers() == ["a"], "40 tokens need 3 of 10 blocks"
    assert side.num_free_blocks == 8, "only full blocks are taken during the transfer"
    assert side.admit() == {}, "its K and V have not arrived"
    side.arrived("a")
    assert side.admit() == {"a": 8}, "40 tokens less two blocks of 16"
    assert side.num_free_blocks == 7
    side.finished("a")
    assert side.num_free_blocks == 10


def test_no_request_overtakes_the_head_of_the_line() -> None:
    side = DecodeSide(num_blocks=6, block_size=4, max_num_seqs=4)
    for name, num_tokens in [("a", 13), ("b", 13), ("c", 2)]:
        side.computed(name, num_tokens)  # they need 4, 4 and 1 of 6 blocks
    assert side.start_transfers() == ["a"], "b does not fit, and c must not overtake it"
    side.arrived("a")
    assert side.admit() == {"a": 1}, "13 tokens less three blocks of 4"
    side.finished("a")
    assert side.start_transfers() == ["b", "c"]


def test_what_is_reserved_is_not_given_away() -> None:
    side = DecodeSide(num_blocks=8, block_size=4, max_num_seqs=4)
    for name in "ab":
        side.computed(name, 13)  # 3 full blocks, and one more
    assert side.start_transfers() == ["a", "b"], "4 + 4 of 8 blocks"
    side.computed("c", 2)  # no full block: it needs one, and the two free ones are reserved
    assert side.num_free_blocks == 2
    assert side.start_transfers() == [], "the two free blocks are reserved for a and b"


def test_the_first_computed_is_admitted_first_even_if_its_transfer_ends_last() -> None:
    side = DecodeSide(num_blocks=20, block_size=4, max_num_seqs=1)
    for name in "ab":
        side.computed(name, 9)
    assert side.start_transfers() == ["a", "b"]
    side.arrived("b")
    side.arrived("a")
    assert side.admit() == {"a": 1}, "a slot for one, and a's prompt was computed first"


def test_a_failed_transfer_is_computed_here() -> None:
    side = DecodeSide(num_blocks=5, block_size=4, max_num_seqs=4)
    side.computed("a", 10)
    assert side.start_transfers() == ["a"]
    side.failed("a")
    assert side.num_free_blocks == 5
    side.computed("b", 6)
    assert side.start_transfers() == ["b"], "3 of 5 blocks are reserved for a, and b needs 2"
    side.computed("c", 2)
    assert side.start_transfers() == [], "all free blocks are reserved: 3 for a, 1 for b"
    assert side.admit() == {"a": 10}, "nothing of a has arrived"


KV_IN_TRANSFER = "its K and V are being transferred"  # a reason to be held


class ByTheEngine:
    """The same with `Scheduler`: requests are held, and sequences that never run keep blocks."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        config = EngineConfig("none", block_size=block_size, max_num_seqs=max_num_seqs)
        self.scheduler = Scheduler(config.for_device("cpu"), num_blocks, max_model_len=256)
        self.manager = self.scheduler.block_manager
        self.line: deque[str] = deque()
        self.answers: dict[str, Sequence] = {}
        self.keepers: dict[str, Sequence] = {}

    def computed(self, name: str, token_ids: list[int], max_tokens: int) -> None:
        params, number = SamplingParams(max_tokens=max_tokens), len(self.answers)
        make = lambda: Sequence(name, list(token_ids), params, 256, arrival=number)  # noqa: E731
        self.answers[name], self.keepers[name] = make(), make()
        self.scheduler.hold(self.answers[name], KV_IN_TRANSFER)
        self.line.append(name)

    def start_transfers(self) -> list[str]:
        started = []
        while self.line:
            keeper = self.keepers[self.line[0]]
            reserved = 0
            for name, seq in self.answers.items():
                if name not in self.line and not seq.finished and seq.slot < 0:
                    have = len(self.keepers[name].block_table)
                    reserved += self.manager.blocks_needed(seq.num_tokens) - have
            needed = self.manager.blocks_needed(keeper.num_tokens)
            if needed + reserved > self.manager.num_free_blocks:
                break
            size = self.manager.block_size
            assert self.manager.allocate(keeper, (keeper.num_tokens - 1) // size * size)
            started.append(self.line.popleft())
        return started

    def arrived(self, name: str) -> None:
        keeper = self.keepers[name]
        self.manager.cache(keeper, len(keeper.block_table) * self.manager.block_size)
        self.scheduler.release([self.answers[name]], KV_IN_TRANSFER)

    def failed(self, name: str) -> None:
        self.manager.free(self.keepers[name])
        self.scheduler.release([self.answers[name]], KV_IN_TRANSFER)

    def step(self) -> tuple[dict[str, int], int, list[str]]:
        """The admitted requests with their tokens, the free blocks then, and the finished ones."""
        plan = self.scheduler.schedule()
        rows = {row.seq: row.n for row in plan.rows}
        admitted = {seq.request_id: rows[seq] for seq in plan.admitted}
        for name in admitted:
            self.manager.free(self.keepers[name])
        free, running = self.manager.num_free_blocks, list(self.scheduler.running)
        self.scheduler.commit(plan)
        self.scheduler.update(plan, [[7] for _ in plan.sampled])
        return admitted, free, [seq.request_id for seq in running if seq.finished]


@pytest.mark.parametrize("seed", range(100))
def test_it_admits_the_requests_that_the_engine_admits(seed: int) -> None:
    rng = random.Random(seed)
    size, slots = rng.randint(2, 5), rng.randint(1, 4)
    num_blocks = rng.randint(8, 20)
    side, engine = DecodeSide(num_blocks, size, slots), ByTheEngine(num_blocks, size, slots)
    script = [f"DecodeSide({num_blocks}, {size}, {slots})"]
    in_flight: list[str] = []
    num_to_come, num_ended = 12, 0
    for _ in range(400):
        if num_to_come and rng.random() < 0.5:
            num_to_come -= 1
            length = rng.randint(1, min(24, num_blocks * size - 1))
            name, prompt = str(num_to_come), [rng.randrange(99) for _ in range(length)]
            room = size - len(prompt) % size  # its last token is never computed
            engine.computed(name, [*prompt, 7], rng.randint(1, room))
            side.computed(name, len(prompt) + 1)
            script.append(f"computed({name!r}, {len(prompt) + 1})")
        found, expected = side.start_transfers(), engine.start_transfers()
        script.append(f"start_transfers() == {expected}")
        assert found == expected, f"{found} after {script}"
        in_flight += expected
        for name in rng.sample(in_flight, rng.randint(0, len(in_flight))):
            in_flight.remove(name)
            what = "failed" if rng.random() < 0.15 else "arrived"
            script.append(f"{what}({name!r})")
            for each in (side, engine):
                getattr(each, what)(name)
        admitted, free, ended = engine.step()
        script.append(f"admit() == {admitted}, {free} free")
        found = side.admit()
        assert found == admitted, f"{found} after {script}"
        assert side.num_free_blocks == free, f"{side.num_free_blocks} free after {script}"
        for name in ended:
            script.append(f"finished({name!r})")
            side.finished(name)
        num_ended += len(ended)
        if num_ended == 12:
            break
    assert num_ended == 12 and side.num_free_blocks == num_blocks, script
