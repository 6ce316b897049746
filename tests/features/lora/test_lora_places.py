"""Which adapters have places: nobody waits for ever, and no place has two adapters."""

import random
from collections import Counter

import pytest

from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.features.lora.places import Places
from nanoserve.sampling_params import SamplingParams


def sequence(arrival: int) -> Sequence:
    return Sequence(str(arrival), [1], SamplingParams(), 8, arrival=arrival)


def by_arrival(seq: Sequence) -> int:
    return seq.arrival


def end(places: Places, seq: Sequence) -> None:
    seq.status = SequenceStatus.FINISHED
    places.leave(seq)


def test_an_adapter_keeps_its_place_until_another_one_needs_it() -> None:
    places = Places(2, by_arrival, patience=3)
    a, b, c, d = map(sequence, range(4))
    assert places.may_run(a, "A") and places.may_run(b, "B")
    places.enter(a, "A")
    places.enter(b, "B")
    assert not places.may_run(c, "C")
    places.begin_step()
    end(places, a)
    assert places.adapters == {"A", "B"}
    assert places.may_run(d, "A")  # it is still there
    places.enter(d, "A")
    end(places, d)
    assert places.may_run(c, "C") and places.adapters == {"B", "C"}


def test_who_waits_too_long_claims_a_place() -> None:
    """With the adapter's requests one after the other, its place would never be empty."""
    places = Places(1, by_arrival, patience=3)
    running, waiting = sequence(0), sequence(1)
    assert places.may_run(running, "A")
    places.enter(running, "A")
    for step in range(2, 20):
        places.begin_step()
        is_in = places.may_run(waiting, "B")
        newcomer = sequence(step)
        may = places.may_run(newcomer, "A")
        if may:
            places.enter(newcomer, "A")
            end(places, running)
            running = newcomer
        assert not is_in
        if not may:
            break
    assert step < 10
    end(places, running)
    assert not places.may_run(sequence(50), "C")  # the place is claimed
    assert places.may_run(waiting, "B")
    places.enter(waiting, "B")
    end(places, waiting)
    assert places.may_run(sequence(51), "C")


def test_an_older_request_may_still_join_a_claimed_place() -> None:
    places = Places(1, by_arrival, patience=0)
    first, waiting, older = sequence(5), sequence(3), sequence(1)
    assert places.may_run(first, "A")
    places.enter(first, "A")
    assert not places.may_run(waiting, "B")
    assert places.may_run(older, "A") and not places.may_run(sequence(4), "A")


def test_a_claim_ends_with_its_sequence() -> None:
    places = Places(1, by_arrival, patience=0)
    first, waiting = sequence(0), sequence(1)
    assert places.may_run(first, "A")
    places.enter(first, "A")
    assert not places.may_run(waiting, "B") and not places.may_run(sequence(2), "A")
    end(places, waiting)
    assert places.may_run(sequence(2), "A")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.small(seed=[0])
def test_nobody_starves(seed: int, full_size: bool) -> None:
    """Random requests for many adapters, a few of which get nearly all: all of them run."""
    rng, num_places, most_running = random.Random(seed), 8, 24
    places = Places(num_places, by_arrival, patience=16)
    total = 10_000 if full_size else 2_000
    waiting: list[tuple[Sequence, str]] = []
    running: dict[Sequence, tuple[str, int]] = {}
    added, step, waits = 0, 0, []
    born: dict[Sequence, int] = {}
    while added < total or waiting or running:
        step += 1
        places.begin_step()
        while added < total and len(waiting) < 60:
            popular = rng.random() < 0.8
            adapter = str(rng.randrange(6 if popular else 200))
            seq = sequence(added)
            born[seq], added = step, added + 1
            waiting.append((seq, adapter))
        for seq, (adapter, left) in list(running.items()):
            if left == 0 or rng.random() < 0.01:  # ended, or preempted
                del running[seq]
                if left == 0:
                    end(places, seq)
                else:
                    places.leave(seq)
                    waiting.append((seq, adapter))
                    waiting.sort(key=lambda pair: pair[0].arrival)
            else:
                running[seq] = (adapter, left - 1)
        for seq, adapter in list(waiting):
            if len(running) < most_running and places.may_run(seq, adapter):
                places.enter(seq, adapter)
                waiting.remove((seq, adapter))
                running[seq] = (adapter, rng.randrange(1, 30))
                waits.append(step - born[seq])
        used = Counter((places.index_of(seq), adapter) for seq, (adapter, _) in running.items())
        assert len(used) <= num_places  # one adapter in a place
        assert len({place for place, _ in used}) == len(used)
    assert len(born) == total and max(waits) < 600, max(waits)
