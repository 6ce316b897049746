"""Simulated engines and traffic for tests, with numbers that are quick to compute."""

from random import Random
from typing import Any

from nanoserve.cli.simulate.fleet import Fleet, FleetSettings
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import Results
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival, Traffic
from nanoserve.config import EngineConfig

TIME = LinearTime(0.004, 2e-5, 1e-5, 1e-5, 1e-4, 1e-7, 1e-9)
VOCAB_SIZE = 2047  # of the shape "tiny", without the stop token


def make_setup(num_kv_blocks: int = 500, leaps: bool = True, **options: Any) -> Setup:
    settings = {"prefix_cache_seed": 1, "async_scheduling": False, "max_model_len": 1000}
    config = EngineConfig("tiny", **{**settings, **options}).for_device("cpu")
    step_time = TIME
    return Setup(config, model_config_of("tiny"), num_kv_blocks, step_time, leaps=leaps)


class Listed:
    """Traffic that is given as a list."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.time)

    def arrivals(self) -> list[Arrival]:
        return self._arrivals


def random_traffic(seed: int, num_requests: int = 60, rate: float = 20.0) -> Listed:
    """Requests with shared prefixes; about half end with a stop token, and some come again."""
    rng, now, arrivals = Random(seed), 0.0, []
    prefixes = [rng.choices(range(VOCAB_SIZE), k=rng.randint(10, 90)) for _ in range(3)]
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        prompt = [*rng.choice(prefixes), *rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 60))]
        output = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 120))
        if arrivals and rng.random() < 0.2:
            prompt, output = arrivals[-1].prompt, arrivals[-1].output
        arrivals.append(Arrival(now, prompt, output, rng.choice([None, len(output)])))
    return Listed(arrivals)


def simulate(setup: Setup, traffic: Traffic, **settings: Any) -> tuple[Results, Fleet]:
    fleet = Fleet(setup, FleetSettings(**settings))
    return fleet.run(traffic), fleet
