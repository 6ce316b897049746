"""The sampling parameters of a request, under vLLM's names and with its defaults."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from nanoserve.outputs import RequestOutputKind as RequestOutputKind
from nanoserve.utils.checks import require
from nanoserve.utils.parameter_table import PARAMETERS, Stage, names_of

if TYPE_CHECKING:
    from nanoserve.features.structured.params import StructuredOutputsParams

# (output_token_ids, logits [vocab_size]) -> logits; tensors, but this module imports no torch.
RowProcessor = Callable[[list[int], Any], Any]
T = TypeVar("T")


def with_foreign_names(cls: type[T]) -> type[T]:
    """Decorate a dataclass so that it handles keywords that are not its fields.

    vLLM's other keywords are ignored at values that change nothing, so that scripts for vLLM run.
    Raises `ValueError` for the rest, with the replacement to use.
    """
    init: Any = cls.__init__
    fields = frozenset(vars(cls)["__dataclass_fields__"])

    @wraps(init)
    def __init__(self: T, *args: Any, **given: Any) -> None:
        if not given.keys() <= fields:
            from nanoserve.compat.sampling import without_foreign

            given = without_foreign(given, fields)
        init(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[method-assign,assignment]
    return cls


@with_foreign_names
@dataclass
class SamplingParams:
    """The parameters that control how a request's tokens are sampled and when it stops.

    temperature: 0 (and all below 1e-5) is greedy; otherwise logits are divided by it.
    top_k: only the k most likely tokens; 0 and -1 both mean all of them.
    top_p: only the smallest set of most likely tokens whose probability reaches top_p. The token
        that crosses the border belongs to it (Holtzman et al. 2020, nucleus sampling).
    min_p: only tokens at least min_p times as likely as the most likely one.
    n: number of completions of the prompt; each has its own random stream.
    presence_penalty, frequency_penalty: in [-2, 2], subtracted from the logits of generated tokens,
        once per distinct token or once per occurrence.
    repetition_penalty: in (0, inf), divides the positive and multiplies the negative logits of all
        tokens in prompt and output; 1 is off.
    logit_bias: added to the logits of these token ids; each in [-100, 100].
    allowed_token_ids: only these tokens can be sampled.
    bad_words: strings that are never completed, after a space, a line end, a bracket or nothing; as
        separate tokens, so a token that continues such a word is allowed, as in vLLM.
    min_tokens: EOS, stop tokens and stop strings cannot end the output before it has this many
        tokens.
    logits_processors: callables (output_token_ids, logits [vocab_size]) -> logits, called in turn
        for this request alone, after everything else that changes its logits. They return
        floating-point logits of the same shape; -inf forbids a token, NaN and +inf are errors.
    seed: same seed, same tokens, whatever else runs (in float32 and on a CPU with numba; elsewhere
        16-bit dtypes, integer weights and an 8-bit KV cache may round differently in another
        batch). None or -1: the engine draws one.
    max_tokens: maximum number of output tokens; None is up to `max_model_len`.
    stop: strings; the output ends before the first of them that appears.
    stop_token_ids: end at one of these tokens, in addition to the model's own EOS.
    include_stop_str_in_output: keep the stop string in the output.
    ignore_eos: continue after the model's own EOS, as benchmarks do.
    logprobs: log-probabilities of this many most likely tokens and of the sampled one, at each
        token; of the model's own distribution, before the parameters above change it, unless the
        engine has another `logprobs_mode`. -1: the whole vocabulary.
    logprob_token_ids: return log-probabilities of these token ids, at most 128, instead of the most
        likely ones.
    prompt_logprobs: the same for the tokens of the prompt. Such a request reads nothing from the
        prefix cache, because cached blocks have no logits.
    num_speculative_tokens: maximum number of draft tokens per step, 0 for none; None leaves it to
        the engine (`speculative_config`). The generated tokens do not depend on it.
    structured_outputs: a grammar, a JSON schema, a regular expression or a choice that the output
        obeys; see `nanoserve.features.structured.params.StructuredOutputsParams`.
    detokenize: decode the tokens; with False, `text` stays empty, and there are no stop strings.
    skip_special_tokens: leave special tokens out of the text (they stay in `token_ids`).
    spaces_between_special_tokens: for special tokens that are kept, let the tokenizer write spaces
        around them, which most do not; False writes no spaces.
    output_kind: which outputs `LLMEngine.step` and `AsyncLLM` return before the end.
    extra_args: a dictionary for custom logits processors, which nanoserve does not read.

    Parameters are applied in this order: allowed_token_ids, bad_words, min_tokens, logit_bias,
    penalties, logits_processors, structured_outputs; then, for requests that sample, temperature,
    min_p, top_k, top_p. (vLLM applies structured_outputs first.) Tokens tied with the last kept
    token are kept with it, so the result does not depend on how a sort breaks ties.

    Raises `ValueError` that names the value and the allowed range. Lists have generous limits:
    1,024 stop strings of 16,384 characters together, 4,096 bad words of 65,536, and 524,288 token
    ids in each list of ids. Lists and dictionaries are copied. Constraints that together leave no
    token end the request at that point: see `RequestOutput.error`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: list[RowProcessor] | None = None
    num_speculative_tokens: int | None = None
    structured_outputs: "StructuredOutputsParams | None" = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check all parameters; raises `ValueError`.

        Called on construction, and again when a request is made, because fields can be assigned to.
        Afterwards numbers are Python's, so that sums of them cannot overflow, and lists and
        dictionaries are this object's own copies.
        """
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            if value is not None or not parameter.optional:
                setattr(self, name, parameter.check(name, value))
        self._check_pairs()

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """Create parameters where None means "not given" for every keyword, as in vLLM."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """Return a copy with its own lists and dictionaries."""
        return replace(self)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken; lower temperatures would overflow the logits."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def sets_special_tokens_apart(self) -> bool:
        """True if special tokens are written without the spaces that the tokenizer would add."""
        return not self.skip_special_tokens and not self.spaces_between_special_tokens

    @property
    def has_penalties(self) -> bool:
        return self.acts_in("penalty")

    @property
    def changes_logits(self) -> bool:
        """True if logits are changed by more than temperature and filters before sampling."""
        if self.structured_outputs is not None and self.filters_logits:
            return True  # a grammar's token mask is applied before the filters
        return self.acts_in("mask", "bias", "penalty", "processor")

    @property
    def filters_logits(self) -> bool:
        return not self.is_greedy and self.acts_in("filter")

    def acts_in(self, *stages: Stage) -> bool:
        """Return True if a parameter of one of these stages of the sampler is set."""
        return any(PARAMETERS[name].is_set(getattr(self, name)) for name in names_of(*stages))

    def _check_pairs(self) -> None:
        """Check that the parameters agree with each other."""
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}",
        )
        require(
            self.n == 1 or not self.is_greedy,
            f"n={self.n} completions at temperature={self.temperature} would all be the same: set "
            f"n=1 or a higher temperature",
        )
        require(
            self.detokenize or not self.stop,
            "stop needs detokenize=True, because stop strings are found in text: use "
            "stop_token_ids instead",
        )


if not TYPE_CHECKING:  # otherwise a type checker would accept every attribute name

    def __getattr__(name: str) -> Any:
        """Return the other classes of vLLM's module with this name (PEP 562)."""
        if name.startswith("__"):  # for example, an import looks up __path__
            raise AttributeError(name)
        import nanoserve
        from nanoserve.compat.missing import refuse

        if name not in ("BeamSearchParams", "StructuredOutputsParams"):  # in vLLM's module, too
            refuse(__name__, name)
        return getattr(nanoserve, name)
