"""Implement beam search on top of the engine, with one request per beam and step.

Each request generates a single token, so the engine needs no code for beams. The prefix cache makes
this affordable, because a beam shares all full blocks with the beam that it extends. Beams are kept
and stopped by the rules of transformers' `generate(num_beams=...)`, and the results are the same.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.text_limit import ContextLengthError
from nanoserve.outputs import Logprob, RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.utils.checks import check_bool, check_int, check_number, is_number, require

if TYPE_CHECKING:
    from nanoserve.features.progress import UseTqdm


# (token ids of beams, parameters for all) -> outputs, in the beams' order. A search needs at
# least twice as many log-probabilities as beams; `max_logprobs` does not limit them.
Complete = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search.

    beam_width: continuations kept per prompt.
    max_tokens: maximum length of a continuation.
    ignore_eos: do not end beams at EOS.
    length_penalty: a finished beam's score is its log-probability over length ** length_penalty, so
        values above 0 favour long beams.
    early_stopping: stop when beam_width beams are finished, without looking for a better one.
    temperature: 0 or 1, with the same effect; beams are ranked by the model's own distribution.
    include_stop_str_in_output: keep the EOS that ended a beam.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool = False

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0)
        require(
            self.temperature in (0, 1),
            f"temperature={self.temperature} is not supported by beam search, which ranks beams "
            f"by the model's own distribution; set temperature=0 or 1",
        )
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        for name in ("beam_width", "max_tokens"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 1))  # frozen
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("early_stopping", self.early_stopping)
        penalty = self.length_penalty
        require(is_number(penalty), f"length_penalty={penalty!r} must be a finite number")


@dataclass(frozen=True)
class BeamSearchSequence:
    """One finished beam.

    tokens, text: prompt and continuation with special tokens, as in vLLM. The final EOS is included
        only with `include_stop_str_in_output`.
    logprobs: for each token of the continuation, including EOS, the candidates that it was chosen
        from, by token id.
    cum_logprob: log-probability of the continuation.
    score: the value by which beams are ranked.
    stop_reason: the EOS that ended the beam.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    stop_reason: int | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best `beam_width` sequences, the best one first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class _Beam:
    tokens: list[int]
    cum_logprob: float
    logprobs: tuple[
        Any, ...
    ] = ()  # linked list (previous tokens' candidates, last token's): shared, not copied
    score: float = 0.0
    finish_reason: str = "length"


class _Search:
    """State of the search for one prompt, i.e. its running and finished beams."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, eos: frozenset[int]) -> None:
        self.prompt_len = len(prompt)
        self.params = params
        self.eos = frozenset() if params.ignore_eos else eos
        self.running = [_Beam(prompt, 0.0)]
        self.finished: list[_Beam] = []  # best first, at most beam_width

    @property
    def num_candidates(self) -> int:
        """Number of candidates such that beam_width continue even if they include every EOS."""
        return max(2, 1 + len(self.eos)) * self.params.beam_width

    def advance(self, logprobs: list[dict[int, Logprob]]) -> None:
        """Advance all beams by one token. `logprobs` has the likeliest next tokens of each beam."""
        candidates = [
            _Beam(
                [*beam.tokens, token_id],
                beam.cum_logprob + candidate.logprob,
                (beam.logprobs, next_tokens),
            )
            for beam, next_tokens in zip(self.running, logprobs, strict=True)
            for token_id, candidate in next_tokens.items()
        ]
        candidates.sort(key=lambda beam: -beam.cum_logprob)
        candidates = candidates[: self.num_candidates]
        length = len(candidates[0].tokens) - self.prompt_len
        at_limit = length == self.params.max_tokens
        for rank, beam in enumerate(candidates):
            ended = beam.tokens[-1] in self.eos
            # Only the best beam_width candidates may finish: worse ones would not be kept running.
            if (ended or at_limit) and rank < self.params.beam_width:
                reason = "stop" if ended else "length"
                score = beam.cum_logprob / length**self.params.length_penalty
                self.finished.append(replace(beam, score=score, finish_reason=reason))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.params.beam_width :]
        going_on = [beam for beam in candidates if beam.tokens[-1] not in self.eos]
        self.running = [] if at_limit else going_on[: self.params.beam_width]
        if self.running and self._cannot_improve(length):
            self.running = []

    def _cannot_improve(self, length: int) -> bool:
        """Return True if no running beam, ending now, could beat the worst finished beam."""
        if len(self.finished) < self.params.beam_width:
            return False
        best = self.running[0].cum_logprob / length**self.params.length_penalty
        return self.params.early_stopping or best <= self.finished[-1].score


def search_all(
    engine: GuardedEngine,
    complete: Complete,
    prompts: AbstractSequence[Prompt],
    params: BeamSearchParams,
    use_tqdm: "UseTqdm" = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """Search all prompts, at most `concurrency_limit` at a time, with a progress bar.

    `complete` runs one-token requests in this engine. Raises `ValueError` if a prompt leaves no
    room for `max_tokens`, and if `logprobs_mode` of the engine is not one of log-probabilities. An
    error of a beam's request, such as non-finite logits, is raised too.
    """
    mode = engine.config.logprobs_mode
    require(
        mode.endswith("logprobs"),
        f"beam search adds log-probabilities, but the engine's logprobs_mode={mode!r} returns "
        f"logits: use 'raw_logprobs'",
    )
    if concurrency_limit is not None:
        check_int("concurrency_limit", concurrency_limit, 1)
    searches = [_begin(engine, prompt, params) for prompt in prompts]
    size = concurrency_limit or max(1, len(searches))
    with _bar(len(searches), use_tqdm) as note_done:
        for first in range(0, len(searches), size):
            _run(engine, complete, searches[first : first + size], note_done)
    return [
        BeamSearchOutput([_sequence(engine, beam, params) for beam in search.finished])
        for search in searches
    ]


def _begin(engine: GuardedEngine, prompt: Prompt, params: BeamSearchParams) -> _Search:
    processor = engine.input_processor
    request = processor.process("beam search", prompt)
    token_ids = request.prompt_token_ids
    require(
        request.sequences[0].prompt_embeds is None,
        "beam search takes text and token ids, not embeddings: use generate()",
    )
    most = processor.max_model_len
    if len(token_ids) + params.max_tokens > most:
        raise ContextLengthError.of(
            most,
            len(token_ids),
            params.max_tokens,
            f"{len(token_ids)} tokens of prompt and {params.max_tokens} of output exceed "
            f"max_model_len={most}.",
        )
    return _Search(token_ids, params, processor.eos_token_ids)


@contextmanager
def _bar(total: int, use_tqdm: "UseTqdm") -> Iterator[Callable[[], Any]]:
    if not use_tqdm:
        yield lambda: None
        return
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(total=total, desc="Beam searches", dynamic_ncols=True) as bar:
        yield bar.update


def _run(
    engine: GuardedEngine,
    complete: Complete,
    searches: list[_Search],
    note_done: Callable[[], Any],
) -> None:
    """Run these searches to the end. One step of all their beams forms one batch."""
    num_logprobs = max((search.num_candidates for search in searches), default=0)
    one_token = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=min(num_logprobs, engine.input_processor.vocab_size),
    )
    while running := [search for search in searches if search.running]:
        beams = [beam.tokens for search in running for beam in search.running]
        outputs = complete(beams, one_token)
        for output in outputs:
            if output.error is not None:
                raise output.error
            if output.outputs[0].finish_reason == "abort":
                raise RuntimeError("the requests of a beam search were aborted during the search")
        next_tokens = iter(step for output in outputs for step in output.outputs[0].logprobs or ())
        for search in running:
            search.advance([next(next_tokens) for _ in search.running])
            if not search.running:
                note_done()


def _sequence(engine: GuardedEngine, beam: _Beam, params: BeamSearchParams) -> BeamSearchSequence:
    is_stopped, tokens = beam.finish_reason == "stop", beam.tokens
    if is_stopped and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    logprobs, link = [], beam.logprobs
    while link:
        link, candidates = link
        logprobs.append(candidates)
    return BeamSearchSequence(
        tokens,
        "" if engine.tokenizer is None else engine.tokenizer.decode(tokens, False),
        beam.cum_logprob,
        beam.score,
        beam.finish_reason,
        logprobs[::-1],
        beam.tokens[-1] if is_stopped else None,
    )
