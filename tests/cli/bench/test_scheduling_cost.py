"""benchmarks/scheduling_cost.py, handover.py and overlap.py: real decode steps, without a model."""

import handover
import numpy as np
import overlap
import pytest
import scheduling_cost

from nanoserve.engine.batch import Batch


def test_the_scheduler_side_is_timed_over_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    pack = Batch.pack

    def watch(batch: Batch, *args: object) -> None:
        pack(batch, *args)
        packed.append(batch.header)

    monkeypatch.setattr(Batch, "pack", watch)
    times = scheduling_cost.measure(3, 20)
    decodes = [header for header in packed if header.num_decode_rows == header.num_tokens == 3]
    assert len(times) == len(decodes) == len(packed) - 1  # before them, the prompts
    assert all(min(parts) > 0 for parts in times)


def test_what_is_handed_over_is_a_decode_step() -> None:
    layout = handover.layout_for(3, 40)
    batch = Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8))
    handover.pack_decode_step(batch, 3, 40)
    header = batch.header
    assert (header.num_rows, header.num_decode_rows, header.num_sampled) == (3, 3, 3)
    shapes = {name: array.shape for name, array in handover.arrays_of(batch).items()}
    assert (shapes.pop("slot_mapping"), shapes.pop("block_tables")) == ((1, 3), (1, 3, 3))
    assert set(shapes.values()) == {(3,)}


@pytest.mark.size("full")
def test_a_worker_gets_a_step_either_way() -> None:
    """It answers with what it has seen, which `measure` compares."""
    shared, pickled = handover.measure(2, 20)
    assert shared > 0 and pickled > 0


@pytest.mark.size("full")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_takes_as_long_as_its_device(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This device is far slower than the scheduler side, whatever else the machine does."""
    monkeypatch.setattr(overlap, "_STEPS", 15)
    step = overlap.median_step(2, seconds=0.02, ahead=ahead)
    assert 0.019 < step < 0.2
