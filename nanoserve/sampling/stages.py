"""The stages from a row's logits to its token.

The order is fixed: allowed_token_ids, bad_words, min_tokens, logit_bias, penalties, the request's
and then the engine's logits processors, the grammar's token mask, temperature, filters (min_p,
top_k, top_p), and the exponential race. See `nanoserve.sampling.processors` for vLLM's order.

A stage decides which slots need it, and changes the logits of their rows in place. A step calls
each stage once, for the rows that need it, so a row never pays for a stage that only another row
needs. The functions of most stages are in separate modules, which are loaded when the first row
needs them.

A custom stage is a class whose constructor takes no arguments:

    class TopNSigma:  # Tang et al. 2024: keep logits within n standard deviations of the largest
        def wants(self, update: SlotUpdate) -> bool:
            return "top_n_sigma" in (update.params.extra_args or {})

        def apply(self, logits: torch.Tensor, rows: Rows) -> None:
            n = [state.params.extra_args["top_n_sigma"] for state in rows.states]
            with rows.part(logits) as part:  # float32 [len(n), vocab_size]
                ...

    register_stage("top_n_sigma", "my_package.my_module:TopNSigma")

Engines that are created later have it, and `SamplingParams(extra_args={"top_n_sigma": 1.0})`
enables it. It can read `rows.states` (see `SlotState`), and may end a request with `rows.fail(i,
error)`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanoserve.engine.executor import SlotUpdate
from nanoserve.utils.checks import require
from nanoserve.utils.registry import Registry

if TYPE_CHECKING:
    import torch

    from nanoserve.sampling.processors import BatchProcessor
    from nanoserve.sampling.rows import Rows

Apply = Callable[["torch.Tensor", "Rows"], None]

_PROCESSORS = "nanoserve.sampling.processors"
# The function that changes the logits, by the stage's name; for registered stages, a class.
STAGES: Registry[Any] = Registry(
    "stage",
    {
        "allowed_token_ids": f"{_PROCESSORS}:keep_allowed",
        "bad_words": f"{_PROCESSORS}:forbid_bad_words",
        "min_tokens": f"{_PROCESSORS}:hold_back_stops",
        "logit_bias": f"{_PROCESSORS}:add_bias",
        "penalties": f"{_PROCESSORS}:penalise",
        "logits_processors": f"{_PROCESSORS}:run_own_processors",
        "engine_processors": f"{__name__}:BatchProcessors",
        "token_mask": "nanoserve.sampling.token_masks:apply_token_masks",
        "temperature": f"{__name__}:divide_by_temperature",
        "filters": f"{__name__}:filter_logits",
        "race": f"{__name__}:Race",
    },
)
_OWN: dict[str, str] = {}  # registered stages, and the stage that each comes before


class Stage(NamedTuple):
    """One change of logits on the way to a token.

    wants: returns True if the rows of a slot pass through the stage. apply: changes float32 logits
    in place, in the rows `Rows.places`. is_registered: True if it was added by `register_stage`.
    bit: its bit in `Settings.stages`.
    """

    name: str
    wants: Callable[[SlotUpdate], bool]
    apply: Apply
    is_registered: bool = False
    bit: int = 0


def make_stages(processors: "Sequence[BatchProcessor]" = ()) -> list[Stage]:
    """Return all stages, in order. processors: the engine's, which get every row."""
    stages = [
        Stage(
            "allowed_token_ids",
            lambda update: bool(update.params.allowed_token_ids),
            _loaded_late("allowed_token_ids"),
        ),
        Stage(
            "bad_words",
            lambda update: bool(update.params.bad_words or update.bad_words_token_ids),
            _loaded_late("bad_words"),
        ),
        Stage(
            "min_tokens",
            lambda update: update.params.min_tokens > 0,
            _loaded_late("min_tokens"),
        ),
        Stage(
            "logit_bias",
            lambda update: bool(update.params.logit_bias),
            _loaded_late("logit_bias"),
        ),
        Stage(
            "penalties",
            lambda update: update.params.has_penalties,
            _loaded_late("penalties"),
        ),
        Stage(
            "logits_processors",
            lambda update: bool(update.params.logits_processors),
            _loaded_late("logits_processors"),
        ),
        Stage("engine_processors", lambda update: bool(processors), BatchProcessors(processors)),
        Stage(
            "token_mask",
            # Tokens that a grammar forbids are removed before filters are applied. Rows without
            # filters use unmodified logits: see `nanoserve.sampling.token_masks`.
            lambda update: (
                update.params.structured_outputs is not None and update.params.filters_logits
            ),
            _loaded_late("token_mask"),
        ),
        Stage("temperature", _samples, divide_by_temperature),
        Stage("filters", lambda update: update.params.filters_logits, filter_logits),
        Stage("race", _samples, Race()),
    ]
    for name, before in _OWN.items():
        own = STAGES.get(name)()
        place = next(i for i, stage in enumerate(stages) if stage.name == before)
        stages.insert(place, Stage(name, own.wants, own.apply, is_registered=True))
    return [stage._replace(bit=1 << number) for number, stage in enumerate(stages)]


def register_stage(name: str, location: str, before: str = "temperature") -> None:
    """Add a custom stage, given as "module:Class", to engines that are created later.

    before: the stage that it comes directly before. Raises `ValueError` for a name that another
    stage has, and for a position after the temperature: the stages that follow are one kernel on a
    GPU.
    """
    known = [stage.name for stage in make_stages()]
    places = known[: known.index("temperature") + 1]
    require(before in places, f"before={before!r} must be one of {places}")
    STAGES.register(name, location)
    _OWN[name] = before


def apply_stages(stages: Sequence[Stage], logits: "torch.Tensor", rows: "Rows") -> None:
    """Apply stages to float32 logits [num_rows, vocab_size], in place, where rows need them."""
    wanted = rows.settings["stages"]
    wanted_by_any = int(np.bitwise_or.reduce(wanted))
    for stage in stages:
        if wanted_by_any & stage.bit:
            index = np.flatnonzero(wanted & np.uint64(stage.bit))
            stage.apply(logits, rows.among(index))


class BatchProcessors:
    """The stage of the engine's `logits_processors`; each gets all rows and their states."""

    def __init__(self, processors: "Sequence[BatchProcessor]") -> None:
        self._processors = processors

    def __call__(self, logits: "torch.Tensor", rows: "Rows") -> None:
        states: Any = list(rows.states)
        with rows.part(logits) as part:
            for processor in self._processors:
                processor(part, states)


def divide_by_temperature(logits: "torch.Tensor", rows: "Rows") -> None:
    from nanoserve.sampling.rows import tensor_of

    with rows.part(logits) as part:
        part /= tensor_of(rows.settings["temperature"], logits).unsqueeze(1)


def filter_logits(logits: "torch.Tensor", rows: "Rows") -> None:
    from nanoserve.sampling.filters import apply_filters
    from nanoserve.sampling.rows import tensor_of

    values = (tensor_of(rows.settings[name], logits) for name in ("top_k", "top_p", "min_p"))
    with rows.part(logits) as part:
        apply_filters(part, *values)


class Race:
    """The exponential race: token t takes a time E / p(t), E from Exp(1); the first token wins.

    Token t wins with probability p(t). In logarithms the winner is argmax(logit - log E), and no
    softmax is needed.
    """

    def __init__(self) -> None:
        self._noise: Any = None  # created when the first row samples

    def __call__(self, logits: "torch.Tensor", rows: "Rows") -> None:
        from nanoserve.sampling.gumbel_noise import Noise, row_keys

        if self._noise is None:
            self._noise = Noise(logits.shape[1], logits.device)
        settings = rows.settings
        keys = row_keys(settings["seed"], rows.positions, settings["completion"])
        with rows.part(logits) as part:
            self._noise.subtract_log_exponential(part, keys)


def _samples(update: SlotUpdate) -> bool:
    return not update.params.is_greedy


def _loaded_late(name: str) -> Apply:
    """Return a function that imports the function of stage `name` on its first call."""
    return lambda logits, rows: STAGES.get(name)(logits, rows)
