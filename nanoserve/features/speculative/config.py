"""`speculative_config={...}`, under vLLM's names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanoserve.utils.checks import (
    check_bool,
    check_choice,
    check_int,
    check_names,
    check_number,
    require,
)
from nanoserve.utils.registry import Registry

# How draft tokens are proposed: functions (EngineConfig, ModelConfig) -> `MakeProposer`, which
# raise `ValueError` before any weight is read.
METHODS: Registry[Callable[..., Any]] = Registry(
    "speculative method",
    {
        "ngram": "nanoserve.features.speculative.ngram:prepare_ngram",
        "suffix": "nanoserve.features.speculative.suffix:prepare_suffix",
        "draft_model": "nanoserve.features.speculative.draft_model:prepare_draft_model",
        "hidden_head": "nanoserve.features.speculative.head_proposer:prepare_hidden_head",
    },
)
_WITH_MODEL = ("draft_model", "hidden_head")
_WITHOUT_MODEL = ("ngram", "suffix")
_MOST_DRAFT_TOKENS = 32  # of a row
# By device, unless a number is given. A GPU's attention has tiles for 1, 2, 4, 8 and 16 queries of
# a row: 8 draft tokens and the token before them would leave half of a tile for 16 empty.
_DRAFT_TOKENS = {"cpu": 8, "cuda": 7}
_SMALLEST = {
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
    "suffix_decoding_max_tree_depth": 3,
    "suffix_decoding_max_cached_requests": 0,
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How draft tokens are proposed, and how many.

    method: "ngram" copies what followed the last tokens when they occurred before, in prompt or
        output; "suffix" follows the longest such match, in finished requests too, by frequency;
        "draft_model" runs a smaller model of the same vocabulary, which draws with the same
        noise; "hidden_head" runs a small network that goes on from the model's hidden states.
    num_speculative_tokens: at most so many draft tokens a row, up to 32. None: 8 on a CPU and 7 on
        a GPU.
    adaptive: as many draft tokens as pay, by the time that steps take and by how many of them are
        accepted; False is always as many as can be had.
    model: of "draft_model" as `LLM` takes it, of "hidden_head" a file ("tiny-qwen3": what ships).
    revision, dtype, quantization: of "draft_model", its own.
    enforce_eager: on a GPU, whether steps with draft tokens are launched kernel by kernel. False
        records CUDA graphs of them, and cuts their keys into shares, as those of other decode steps
        are. None: False, except with `enforce_eager=True` of the engine, with several ranks, and
        with another attention backend than Triton's.
    prompt_lookup_min, prompt_lookup_max: how many tokens must agree, and how many are looked for
        first. If only one of them is given, it is both.
    suffix_decoding_max_tree_depth: how long a match is followed back.
    suffix_decoding_max_cached_requests: how many finished requests are kept, besides the running
        ones. Requests share only with those that have the same `cache_salt`.
    suffix_decoding_max_spec_factor: at most so many draft tokens for each token of the match.
    suffix_decoding_min_token_prob: drafts end where what was seen makes them less likely.

    Raises `ValueError` for unknown names and values out of range.
    """

    method: str
    num_speculative_tokens: int | None = None
    adaptive: bool = True
    model: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    enforce_eager: bool | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 1000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def of(cls, options: "Mapping[str, Any] | SpeculativeConfig", config: Any) -> Any:
        """Return the options of `EngineConfig`, validated together with the rest of it."""
        if not isinstance(options, cls):
            example = "{'method': 'ngram', 'num_speculative_tokens': 4}"
            check_names("speculative_config", options, cls, example)
            given = {name: value for name, value in options.items() if value is not None}
            require(
                "method" in given,
                f"speculative_config has no 'method', which must be one of {METHODS.names()}",
            )
            options = cls(**given)
        require(
            not config.logits_processors,
            "speculative_config with logits_processors of the engine: they would see draft tokens "
            "as if they had been generated; give them to single requests, which then have none",
        )
        if options.enforce_eager is False:
            _check_graphs(config)
        return options

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS.names())
        if self.num_speculative_tokens is not None:
            check_int("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_DRAFT_TOKENS)
        check_bool("adaptive", self.adaptive)
        if self.enforce_eager is not None:
            check_bool("enforce_eager", self.enforce_eager)
        if self.method in (*_WITH_MODEL, *_WITHOUT_MODEL):  # else it is one of the user's own
            require(
                (self.model is not None) == (self.method in _WITH_MODEL),
                f"method={self.method!r} with model={self.model!r}: a model is what {_WITH_MODEL} "
                f"need, and the others do not",
            )
        for name, smallest in _SMALLEST.items():
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), smallest)
        for name, most in (("max_spec_factor", None), ("min_token_prob", 1)):
            name = f"suffix_decoding_{name}"
            check_number(name, getattr(self, name), 0, most)
        low, high = self.lookup
        require(low <= high, f"prompt_lookup_min={low} exceeds prompt_lookup_max={high}")

    def for_device(self, kind: str, config: Any) -> "SpeculativeConfig":
        """Return these options for a "cpu" or a "cuda", with what was not given.

        config: the `EngineConfig`, with the token budget of a step.
        """
        number = self.num_speculative_tokens or _DRAFT_TOKENS[kind]
        is_eager = self.enforce_eager
        if is_eager is None:
            is_eager = not (kind == "cuda" and _records_graphs_by_default(config, number))
        return replace(self, num_speculative_tokens=number, enforce_eager=is_eager)

    @property
    def lookup(self) -> tuple[int, int]:
        """Return the fewest and the most tokens that are looked up."""
        given = self.prompt_lookup_min, self.prompt_lookup_max
        low, high = given if given != (None, None) else (3, 4)
        return low or high, high or low


def _records_graphs_by_default(config: Any, number: int) -> bool:
    """Return whether CUDA graphs of steps with so many draft tokens a row are recorded by default.

    They are where their tokens have been compared on a GPU: of one rank, with Triton's attention.
    """
    return (
        not config.enforce_eager
        and config.tensor_parallel_size == config.pipeline_parallel_size == 1
        and config.attention_backend in ("auto", "triton")
        and config.max_num_batched_tokens > number
    )


def _check_graphs(config: Any) -> None:
    """Raise `ValueError` where no CUDA graphs of steps with draft tokens can be recorded."""
    told = "speculative_config with enforce_eager=False records CUDA graphs"
    require(
        not config.enforce_eager,
        f"{told}, and enforce_eager=True of the engine records none: leave one of them out",
    )
    require(
        config.pipeline_parallel_size == 1,
        f"{told}, and pipeline_parallel_size={config.pipeline_parallel_size}: what a stage sends "
        f"and receives has not been part of a graph; leave enforce_eager=False out",
    )
