"""The run of chapter 28: another policy in virtual time, without a model."""

from pathlib import Path

import policies

from nanoserve.cli.simulate.fleet import Fleet
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival
from nanoserve.config import EngineConfig
from nanoserve.features.trace.recorder import TraceRecorder
from nanoserve.features.trace.whole_lines import WholeLines

# Milliseconds of arrival, tokens of the prompt, tokens of the output.
_REQUESTS = ((0, 40, 6), (1, 60, 4), (2, 8, 5), (3, 4, 3), (30, 6, 4))


def shortest_first(out: Path) -> None:
    """Five requests for two slots; whenever one is free, the shortest prompt gets it."""
    options = {"async_scheduling": False, "max_model_len": 100, "max_num_seqs": 2}
    config = EngineConfig("tiny", scheduler_cls=policies.ShortestFirst, **options)
    step_time = LinearTime(fixed=0.01, per_token=0.001)
    setup = Setup(config.for_device("cpu"), model_config_of("tiny"), 20, step_time)
    fleet = Fleet(setup)
    engine = fleet.replicas["0"].engine
    arrivals = [
        Arrival(ms / 1e3, [*range(number, number + n)], [7] * k, k)
        for number, (ms, n, k) in enumerate(_REQUESTS, 1)
    ]
    with WholeLines(out) as file:
        recorder = TraceRecorder(engine, file)
        engine.observers.append(recorder.observe)
        engine.scheduler.block_manager.listeners.append(recorder.cache_changes)
        fleet.run(policies.Requests(arrivals))
