"""Options of speculative decoding (`speculative_config={...}`), under vLLM's names."""

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

# Ways to propose draft tokens: see `nanoserve.features.speculative.proposer.PrepareProposer`.
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
_MOST_DRAFT_TOKENS = 32  # per row
# Default by device. On a GPU, attention has tiles for 1, 2, 4, 8 and 16 queries of a row: 8 draft
# tokens and the token before them would leave almost half of a tile of 16 empty.
_DRAFT_TOKENS = {"cpu": 8, "cuda": 7}
_SMALLEST = {
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
    "suffix_decoding_max_tree_depth": 3,
    "suffix_decoding_max_cached_requests": 0,
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculative decoding, such as the method and the number of draft tokens.

    method: "ngram" copies the tokens that followed an earlier occurrence of the last tokens, in
        prompt or output; "suffix" follows the longest such match, also in the outputs of finished
        requests, by frequency; "draft_model" runs a smaller model with the same vocabulary, which
        samples with the same noise; "hidden_head" runs a small network on the hidden states of the
        model.
    num_speculative_tokens: the most draft tokens per row, 1 to 32. None: 8 on a CPU, 7 on a GPU.
    adaptive: if True, each step verifies the number of draft tokens with the best goodput, by
        measured step times and acceptance rates; if False, all that are proposed.
    model: for "draft_model", a model as `LLM` takes it; for "hidden_head", a file, or "tiny-qwen3"
        for the bundled one.
    revision, dtype, quantization: options of the draft model, for "draft_model".
    enforce_eager: on a GPU, whether steps with draft tokens are launched kernel by kernel. False
        captures CUDA graphs of them, with attention split along the keys as in other decode steps.
        None: False, but True with `enforce_eager=True` of the engine, with several ranks, and with
        an attention backend other than Triton's.
    prompt_lookup_min, prompt_lookup_max: the fewest and the most tokens of an n-gram that is looked
        up, for "ngram". If only one of them is set, it is used for both; 3 and 4 by default.
    suffix_decoding_max_tree_depth: the most tokens of a match, for "suffix".
    suffix_decoding_max_cached_requests: the number of finished requests whose outputs are kept.
        Only requests with the same `cache_salt` share them.
    suffix_decoding_max_spec_factor: the most draft tokens per token of the match.
    suffix_decoding_min_token_prob: a draft ends when its estimated probability is below this.

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
        """Return the options in `EngineConfig`, validated together with its other fields."""
        if not isinstance(options, SpeculativeConfig):
            example = "{'method': 'ngram', 'num_speculative_tokens': 4}"
            check_names("speculative_config", options, cls, example)
            given = {name: value for name, value in options.items() if value is not None}
            require(
                "method" in given,
                f"speculative_config has no 'method'; set one of {METHODS.names()}",
            )
            options = cls(**given)
        require(
            not config.logits_processors,
            "speculative_config is not supported with logits_processors of the engine, which would "
            "see draft tokens as generated tokens; set logits_processors in SamplingParams, "
            "which disables draft tokens for those requests",
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
        if self.method in (*_WITH_MODEL, *_WITHOUT_MODEL):  # a registered method may choose
            require(
                (self.model is not None) == (self.method in _WITH_MODEL),
                f"method={self.method!r} does not match model={self.model!r}: {_WITH_MODEL} need a "
                f"model, and {_WITHOUT_MODEL} take none",
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
        """Return these options with the defaults of a device filled in.

        kind: "cpu" or "cuda". config: the `EngineConfig`, with the token budget of a step.
        """
        number = self.num_speculative_tokens or _DRAFT_TOKENS[kind]
        is_eager = self.enforce_eager
        if is_eager is None:
            is_eager = not (kind == "cuda" and _records_graphs_by_default(config, number))
        return replace(self, num_speculative_tokens=number, enforce_eager=is_eager)

    @property
    def lookup(self) -> tuple[int, int]:
        """Return the fewest and the most tokens of an n-gram that is looked up."""
        given = self.prompt_lookup_min, self.prompt_lookup_max
        low, high = given if given != (None, None) else (3, 4)
        return low or high or 0, high or low or 0


def _records_graphs_by_default(config: Any, number: int) -> bool:
    """Return True if CUDA graphs of steps with draft tokens are captured by default.

    number: draft tokens per row. By default they are captured only where equal tokens have been
    verified on a GPU, which is one rank with Triton's attention.
    """
    return (
        not config.enforce_eager
        and config.tensor_parallel_size == config.pipeline_parallel_size == 1
        and config.attention_backend in ("auto", "triton")
        and config.max_num_batched_tokens > number
    )


def _check_graphs(config: Any) -> None:
    """Raise `ValueError` if CUDA graphs of steps with draft tokens cannot be captured."""
    given = "speculative_config with enforce_eager=False captures CUDA graphs"
    require(
        not config.enforce_eager,
        f"{given}, but enforce_eager=True of the engine disables them; remove one of the two",
    )
    require(
        config.pipeline_parallel_size == 1,
        f"{given}, which is not supported with "
        f"pipeline_parallel_size={config.pipeline_parallel_size}, because a graph cannot contain "
        f"sends and receives between stages; remove enforce_eager=False",
    )
