"""Beam search on top of the engine: each step of a beam is an ordinary request for one token.

The engine knows nothing of beams. What makes it affordable is the prefix cache: a beam's request
shares all full blocks with the beam that it grew from. The rules for what is kept and when to stop
are those of transformers' `generate(num_beams=...)`, whose result this reproduces.
"""

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from nanoserve.checks import check_bool, check_int, is_number, require
from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """beam_width: continuations kept per prompt. length_penalty: a finished beam's score is its
    log-probability over length ** length_penalty, so above 0 favours long ones. early_stopping:
    stop when beam_width beams are finished, without looking for a better one.

    A beam_width of w asks the engine for at least 2 w log-probabilities: see `max_logprobs`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 1))  # frozen
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("early_stopping", self.early_stopping)
        penalty = self.length_penalty
        require(is_number(penalty), f"length_penalty={penalty!r} must be a finite number")


@dataclass(frozen=True)
class BeamSearchSequence:
    """`tokens` are prompt and continuation; `score` is what beams are ranked by."""

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best `beam_width` sequences, the best one first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class _Beam:
    tokens: list[int]
    cum_logprob: float
    score: float = 0.0
    finish_reason: str = "length"


class _Search:
    """The beams of one prompt."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, eos: frozenset[int]) -> None:
        self.prompt_len = len(prompt)
        self.params = params
        self.eos = frozenset() if params.ignore_eos else eos
        self.running = [_Beam(prompt, 0.0)]
        self.finished: list[_Beam] = []  # best first, at most beam_width

    @property
    def num_candidates(self) -> int:
        """Enough that beam_width of them run on, even if every EOS is among them."""
        return max(2, 1 + len(self.eos)) * self.params.beam_width

    def advance(self, logprobs: list[dict[int, float]]) -> None:
        """One step; `logprobs` has the most likely next tokens of each running beam."""
        candidates = [
            _Beam([*beam.tokens, token_id], beam.cum_logprob + logprob)
            for beam, next_tokens in zip(self.running, logprobs, strict=True)
            for token_id, logprob in next_tokens.items()
        ]
        candidates.sort(key=lambda beam: -beam.cum_logprob)
        candidates = candidates[: self.num_candidates]
        length = len(candidates[0].tokens) - self.prompt_len
        at_limit = length == self.params.max_tokens
        for rank, beam in enumerate(candidates):
            ended = beam.tokens[-1] in self.eos
            # Only the beam_width best may finish: a worse one would not have been kept running.
            if (ended or at_limit) and rank < self.params.beam_width:
                reason = "stop" if ended else "length"
                score = beam.cum_logprob / length**self.params.length_penalty
                self.finished.append(_Beam(beam.tokens, beam.cum_logprob, score, reason))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.params.beam_width :]
        going_on = [beam for beam in candidates if beam.tokens[-1] not in self.eos]
        self.running = [] if at_limit else going_on[: self.params.beam_width]
        if self.running and self._cannot_improve(length):
            self.running = []

    def _cannot_improve(self, length: int) -> bool:
        """Whether no running beam could beat the worst finished one, were it to end here."""
        if len(self.finished) < self.params.beam_width:
            return False
        best = self.running[0].cum_logprob / length**self.params.length_penalty
        return self.params.early_stopping or best <= self.finished[-1].score


def beam_search(
    engine: LLMEngine,
    generate: Callable[..., list[RequestOutput]],
    prompts: AbstractSequence[Prompt],
    params: BeamSearchParams,
) -> list[BeamSearchOutput]:
    """Search all prompts side by side: a step of all their beams is one batch.

    `generate` is `LLM.generate`, of the LLM that has this engine. Raises `ValueError` for a prompt
    that leaves no room for `max_tokens`, and for more beams than `max_logprobs` allows; and what a
    beam's request has ended with, if the model's logits are not finite.
    """
    processor = engine.input_processor
    searches = []
    for prompt in prompts:
        token_ids = processor.process("beam search", prompt).prompt_token_ids
        require(
            len(token_ids) + params.max_tokens <= processor.max_model_len,
            f"{len(token_ids)} tokens of prompt and {params.max_tokens} of output exceed "
            f"max_model_len={processor.max_model_len}",
        )
        searches.append(_Search(token_ids, params, processor.eos_token_ids))
    num_logprobs = max((search.num_candidates for search in searches), default=0)
    num_logprobs = min(num_logprobs, processor.vocab_size)
    if num_logprobs > processor.max_logprobs:
        raise ValueError(
            f"beam_width={params.beam_width} needs {num_logprobs} log-probabilities, "
            f"more than max_logprobs={processor.max_logprobs}"
        )
    while any(search.running for search in searches):
        beams = [(search, beam) for search in searches for beam in search.running]
        one_token = SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, logprobs=num_logprobs
        )
        outputs = generate([beam.tokens for _, beam in beams], one_token, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        next_tokens = iter(
            {token_id: candidate.logprob for token_id, candidate in step.items()}
            for output in outputs
            for step in output.outputs[0].logprobs
        )
        for search in searches:
            if search.running:
                search.advance([next(next_tokens) for _ in search.running])
    return [BeamSearchOutput([_sequence(engine, s, beam) for beam in s.finished]) for s in searches]


def _sequence(engine: LLMEngine, search: _Search, beam: _Beam) -> BeamSearchSequence:
    tokenizer, output = engine.tokenizer, beam.tokens[search.prompt_len :]
    text = "" if tokenizer is None else tokenizer.decode(output)
    return BeamSearchSequence(beam.tokens, text, beam.cum_logprob, beam.score, beam.finish_reason)
