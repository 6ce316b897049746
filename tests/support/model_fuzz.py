"""One random life of a whole engine, with a model: what everybody gets is what he gets alone.

Configuration, requests and what happens to them (arrivals, aborts, streams that are dropped, code
that raises, a device that fails) come from one seed. The reference is the same request, alone in an
engine with room for everything and no prefix cache.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanoserve import LLM, BeamSearchParams, SamplingParams
from nanoserve.outputs import CompletionOutput, Logprob, RequestOutput
from nanoserve.sampling_params import RequestOutputKind

VOCAB_SIZE = 2048  # of the bundled tokenizer
MAX_MODEL_LEN = 96
LOGPROB_TOLERANCE = 2e-3
STOPS = ["e", "th", "a", "ck", "\n", " ", "in", ".", "\u5757"]
KINDS = list(RequestOutputKind)


class Difference(AssertionError):
    """A request did not get what it gets alone, or something was left behind."""


class DeviceError(RuntimeError):
    """What the device raises in this run, now and then."""


class OwnError(RuntimeError):
    """What a request's logits processor raises."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Difference(what)


def reference_engine(checkpoint: Any, **options: Any) -> LLM:
    """One for all runs: nothing is shared in it, and each request is alone."""
    own: dict[str, Any] = {
        "tokenizer": "tiny-qwen3",
        "max_model_len": MAX_MODEL_LEN,
        "num_kv_blocks": 128,
        "enable_prefix_caching": False,
        "attention_backend": "torch",
    }
    return LLM(checkpoint, **own | options)


@dataclass
class Case:
    """A request, and what has come of it."""

    prompt: dict[str, Any]
    settings: dict[str, Any]  # of its `SamplingParams`
    kind: RequestOutputKind
    fails_at: int | None = None  # so many tokens, and its logits processor raises
    final: RequestOutput | None = None
    pieces: dict[int, CompletionOutput] = field(default_factory=dict)  # what deltas add up to

    def params(self, may_fail: bool = True) -> SamplingParams:
        settings = dict(self.settings)
        if may_fail and self.fails_at is not None:
            settings["logits_processors"] = [self._fail]
        return SamplingParams(**settings, output_kind=self.kind)

    def _fail(self, output_token_ids: list[int], logits: Any) -> Any:
        if len(output_token_ids) >= self.fails_at:
            raise OwnError(f"after {self.fails_at} tokens")
        return logits

    def take(self, output: RequestOutput) -> None:
        """One more output of this request, of whatever kind."""
        require(self.final is None, f"{output.request_id}: an output after the last one")
        if self.kind is RequestOutputKind.DELTA:
            for new in output.outputs:
                self.pieces[new.index] = _joined(self.pieces.get(new.index), new)
        elif self.kind is RequestOutputKind.CUMULATIVE:
            for new in output.outputs:
                old = self.pieces.get(new.index, new)
                require(new.text.startswith(old.text), f"{old.text!r} became {new.text!r}")
                require(new.token_ids[: len(old.token_ids)] == old.token_ids, "tokens changed")
                self.pieces[new.index] = new
        else:
            require(output.finished, f"{output.request_id}: an output before the end")
            self.pieces = {new.index: new for new in output.outputs}
        if output.finished:
            self.final = output


def _joined(old: CompletionOutput | None, new: CompletionOutput) -> CompletionOutput:
    if old is None:
        return new
    logprobs = None if new.logprobs is None else [*old.logprobs, *new.logprobs]
    return CompletionOutput(
        new.index,
        old.text + new.text,
        old.token_ids + new.token_ids,
        new.finish_reason,
        new.stop_reason,
        logprobs,
        new.cumulative_logprob,
        routed_experts=new.routed_experts,
    )


def _roll(output_token_ids: list[int], logits: Any) -> Any:
    """A processor that depends on what has been generated."""
    return logits.roll(1) if len(output_token_ids) % 2 else logits


class ModelRun:
    def __init__(
        self,
        seed: int,
        checkpoint: Any,
        reference: LLM,
        tolerance: float = LOGPROB_TOLERANCE,
        **options: Any,
    ) -> None:
        """`options` of the engine go before those that chance chooses.

        tolerance: of log-probabilities; 0 requires equal bits.
        """
        self.tolerance = tolerance
        self.rng = rng = random.Random(seed)
        self.reference = reference
        self.counts: Counter[str] = Counter()
        block_size = rng.choice([1, 2, 3, 4, 8, 16, 33, 64])
        fits_alone = -(-MAX_MODEL_LEN // block_size)
        max_num_seqs = rng.choice([1, 2, 3, 8])
        policy = rng.choice(["fcfs", "priority"])
        self.options = {
            "max_model_len": MAX_MODEL_LEN,
            "block_size": block_size,
            "num_kv_blocks": fits_alone + rng.choice([0, 0, 1, 3, fits_alone]),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + rng.choice([0, 1, 13, 30, 250]),
            "long_prefill_token_threshold": rng.choice([0, 0, 1, 7]),
            "scheduling_policy": policy,
            "priority_aging": rng.choice([None, 2]) if policy == "priority" else None,
            "enable_prefix_caching": rng.random() < 0.8,
            "async_scheduling": rng.random() < 0.5,
            "attention_backend": rng.choice(["torch", "numba"]),
            **options,
        }
        self.llm = LLM(checkpoint, tokenizer="tiny-qwen3", **self.options)
        self.engine = self.llm.engine
        self.engine.observers.append(self._observe)
        self._step, self.engine.step = self.engine.step, self._checked_step
        self._forward, self.engine.executor.forward = (
            self.engine.executor.forward,
            self._forward_or_fail,
        )
        self.device_fails = rng.random() < 0.5
        self.abort_share = rng.choice([0, 0, 0.01, 0.03])  # of turns, and of steps
        self.beginnings = [self._random_ids(MAX_MODEL_LEN) for _ in range(2)]
        self.cases: dict[str, Case] = {}
        self.waiting = [self._random_case() for _ in range(rng.randint(3, 8))]
        self.streams: dict[str, Iterator[RequestOutput]] = {}
        self.read_now: str | None = None  # the stream whose `next` is running

    def run(self) -> None:
        """Raises `Difference`, or the `RuntimeError` of `Scheduler.check`."""
        with self.llm:
            self._live()
            self.device_fails = False
            self.engine.observers.clear()
            self._search_beams()
            self._check_nothing_is_left()
        stats = self.llm.stats
        self.counts["preemptions"] += stats.num_preemptions
        self.counts["hit tokens"] += stats.prefix_cache_hits
        for request_id, case in self.cases.items():
            self._compare(request_id, case)

    # ------------------------------------------------------------ what happens

    def _live(self) -> None:
        rng, engine = self.rng, self.engine
        for _ in range(rng.randint(0, 2)):
            self._open_stream()
        turns = 0
        while self.waiting or self.streams or engine.has_unfinished_requests():
            turns += 1
            require(turns < 20_000, "livelock: the run does not end")
            if self.waiting and (not engine.has_unfinished_requests() or rng.random() < 0.3):
                self._add_one()
            if self.streams and rng.random() < 0.5:
                self._read_stream(rng.choice(list(self.streams)))
            else:
                self._step_once()
            if rng.random() < self.abort_share:
                self._abort_one()
            if self.streams and rng.random() < 0.02:
                self._drop_stream()

    def _add_one(self) -> None:
        request_id, case = f"r{len(self.waiting)}", self.waiting.pop()
        self.cases[request_id] = case
        by_priority = self.options["scheduling_policy"] == "priority"
        priority = self.rng.randint(-2, 2) if by_priority else 0
        self.engine.add_request(request_id, case.prompt, case.params(), priority)

    def _open_stream(self) -> None:
        case = self._random_case()
        case.kind = RequestOutputKind.DELTA
        before = set(self.engine.output_processor.requests)
        stream = self.llm.stream(case.prompt, case.params())
        (request_id,) = set(self.engine.output_processor.requests) - before
        self.streams[request_id], self.cases[request_id] = stream, case
        self.counts["streams"] += 1

    def _read_stream(self, request_id: str) -> None:
        case, self.read_now = self.cases[request_id], request_id
        try:
            case.take(next(self.streams[request_id]))
        except StopIteration:
            del self.streams[request_id]
        except OwnError:
            require(case.final is not None and case.final.error is not None, "error out of nowhere")
            del self.streams[request_id]
        except DeviceError:  # it has ended this stream, wherever the step was
            del self.streams[request_id], self.cases[request_id]
        finally:
            self.read_now = None

    def _drop_stream(self) -> None:
        request_id = self.rng.choice(list(self.streams))
        if request_id != self.read_now:  # a generator cannot be closed while it runs
            self.streams.pop(request_id).close()
            self.cases.pop(request_id)
            self.counts["dropped streams"] += 1

    def _step_once(self) -> None:
        try:
            outputs = self.engine.step()
        except DeviceError:
            return
        for output in outputs:
            require(output.request_id not in self.streams, "a stream's output went elsewhere")
            if output.request_id in self.cases:
                self.cases[output.request_id].take(output)

    def _abort_one(self) -> None:
        live = list(self.engine.output_processor.requests)
        if live:
            request_id = self.rng.choice(live)
            output = self.engine.abort_request(request_id)
            if output is not None and request_id not in self.streams:
                self.cases[request_id].take(output)
            elif output is not None:
                self.cases.pop(request_id)  # its reader comes to an end, and gets no last output
                self.streams.pop(request_id).close()
            self.counts["aborts"] += 1

    def _observe(self, *_: Any) -> None:
        """In the middle of a step: another abort, another arrival, a stream that is collected."""
        if self.rng.random() < self.abort_share:
            self._abort_in_step()
        if self.waiting and self.rng.random() < 0.1:
            self._add_one()
        if self.streams and self.rng.random() < 0.01:
            self._drop_stream()

    def _abort_in_step(self) -> None:
        live = [r for r in self.engine.output_processor.requests if r not in self.streams]
        if live:
            self.engine.abort_request(self.rng.choice(live))
            self.counts["aborts inside a step"] += 1

    def _checked_step(self, fetch: bool = True) -> list[RequestOutput]:
        try:
            return self._step(fetch)
        finally:
            self.counts["steps"] += 1
            self.engine.scheduler.check()

    def _forward_or_fail(self, *args: Any) -> Any:
        if self.device_fails and self.rng.random() < 0.01:
            self.counts["failed steps"] += 1
            raise DeviceError
        return self._forward(*args)

    def _search_beams(self) -> None:
        if self.rng.random() < 0.3:
            params = BeamSearchParams(self.rng.randint(1, 3), max_tokens=self.rng.randint(1, 6))
            prompt = self.beginnings[0][: self.rng.randint(1, 60)]
            found, expected = (
                [beam.tokens for beam in llm.beam_search(prompt, params)[0].sequences]
                for llm in (self.llm, self.reference)
            )
            require(found == expected, f"beams of {prompt}: {found}, alone {expected}")
            self.counts["beam searches"] += 1

    # ------------------------------------------------------------ what must hold

    def _check_nothing_is_left(self) -> None:
        engine = self.engine
        scheduler, output_processor = engine.scheduler, engine.output_processor
        left = {
            "blocks": scheduler.block_manager.num_free_blocks != self.options["num_kv_blocks"],
            "slots": len(scheduler._slots._free) != self.options["max_num_seqs"],
            "sequences": scheduler.running or scheduler.waiting or scheduler.held,
            "requests": output_processor.requests,
            "decoded text": output_processor._detokenizer._streams,
            "streams": engine.loop.outputs._queues,
            "steps under way": engine.plans_under_way,
            "outputs": len(engine.loop.outputs),
        }
        left = [name for name, is_left in left.items() if is_left]
        require(not left, f"left behind: {left}")

    def _compare(self, request_id: str, case: Case) -> None:
        require(case.final is not None, f"{request_id} was lost")
        params = case.params(may_fail=False)
        (alone,) = self.reference.generate(case.prompt, params, use_tqdm=False)
        reasons = {completion.finish_reason for completion in case.pieces.values()}
        num_prompt_tokens = len(case.prompt["prompt_token_ids"])
        who = f"{request_id} ({case.kind}, {case.settings}, prompt of {num_prompt_tokens} tokens)"
        if reasons & {"abort", "error"} or len(case.pieces) < len(alone.outputs):
            self._compare_beginnings(case, alone, who)
            return
        self.counts["requests"] += 1
        self.counts["completions"] += len(alone.outputs)
        for expected in alone.outputs:
            _compare_completions(case.pieces[expected.index], expected, self.tolerance, who)
        of_prompt = case.final.prompt_logprobs
        require((of_prompt is None) == (alone.prompt_logprobs is None), f"{who}: prompt_logprobs")
        _compare_logprobs(of_prompt, alone.prompt_logprobs, self.tolerance, who)

    def _compare_beginnings(self, case: Case, alone: RequestOutput, who: str) -> None:
        """It was ended, by somebody or by its own code: what it got is right as far as it goes."""
        is_error = case.final.error is not None
        require(not is_error or case.fails_at is not None, f"{who}: error {case.final.error!r}")
        self.counts["requests that failed" if is_error else "requests that were aborted"] += 1
        for completion in case.pieces.values():
            token_ids = alone.outputs[completion.index].token_ids
            given = completion.token_ids
            require(token_ids[: len(given)] == given, f"{who}: {given}, alone {token_ids}")

    # ------------------------------------------------------------ what is asked for

    def _random_ids(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(count)]

    def _random_case(self) -> Case:
        rng = self.rng
        shared = rng.choice(self.beginnings)[: rng.choice([0, 40, 60, 60, rng.randint(0, 60)])]
        prompt: dict[str, Any] = {"prompt_token_ids": shared + self._random_ids(rng.randint(1, 20))}
        if rng.random() < 0.2:
            prompt["cache_salt"] = rng.choice("ab")
        settings = self._random_choice() | self._random_end()
        asked = {
            "prompt_logprobs": (0.2, lambda: rng.randint(0, 3)),
            "logprobs": (0.25, lambda: rng.randint(0, 3)),
            "repetition_penalty": (0.2, lambda: rng.choice([0.8, 1.3])),
            "frequency_penalty": (0.15, lambda: rng.choice([-1, 0.7])),
            "presence_penalty": (0.15, lambda: rng.choice([-1, 0.7])),
            "logit_bias": (0.15, lambda: {i: rng.uniform(-5, 5) for i in self._random_ids(3)}),
            "allowed_token_ids": (0.1, lambda: self._random_ids(30)),
            "bad_words": (0.1, lambda: ["the", "a"]),
            "skip_special_tokens": (0.1, lambda: False),
        }
        settings |= {name: make() for name, (share, make) in asked.items() if rng.random() < share}
        fails_at = rng.randint(0, 10) if rng.random() < 0.08 else None
        if fails_at is None and rng.random() < 0.15:
            settings["logits_processors"] = [_roll]
        return Case(prompt, settings, rng.choice(KINDS), fails_at)

    def _random_choice(self) -> dict[str, Any]:
        """How it chooses a token; the same one whenever it is asked again."""
        rng = self.rng
        if rng.random() < 0.5:
            return {"temperature": 0}
        return {
            "temperature": rng.choice([0.5, 1.0, 2.0]),
            "seed": rng.choice([0, 1, 2**64 - 1, rng.getrandbits(64)]),
            "top_k": rng.choice([0, -1, 1, 5, 50]),
            "top_p": rng.choice([1, 0.3, 0.9]),
            "min_p": rng.choice([0, 0, 0.1]),
            "n": rng.choice([1, 1, 2, 4]),
        }

    def _random_end(self) -> dict[str, Any]:
        rng = self.rng
        settings: dict[str, Any] = {"max_tokens": rng.randint(1, 24)}
        if rng.random() < 0.3:
            settings["stop"] = rng.sample(STOPS, rng.randint(1, 3))
            settings["include_stop_str_in_output"] = rng.random() < 0.5
        if rng.random() < 0.2:
            settings["stop_token_ids"] = self._random_ids(20)
        if rng.random() < 0.2:
            settings["min_tokens"] = rng.randint(0, settings["max_tokens"])
        if rng.random() < 0.2:
            settings["ignore_eos"] = True
        return settings


def _compare_completions(
    given: CompletionOutput, alone: CompletionOutput, tolerance: float, who: str
) -> None:
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        found, expected = getattr(given, name), getattr(alone, name)
        require(found == expected, f"{who}: {name} {found!r}, alone {expected!r}")
    require((given.logprobs is None) == (alone.logprobs is None), f"{who}: logprobs")
    _compare_logprobs(given.logprobs, alone.logprobs, tolerance, who)
    if given.logprobs is not None:
        chosen = [
            at[token].logprob for at, token in zip(given.logprobs, given.token_ids, strict=True)
        ]
        difference = abs(sum(chosen) - given.cumulative_logprob)
        require(difference < LOGPROB_TOLERANCE, f"{who}: cumulative_logprob")


def _compare_logprobs(
    given: list[dict[int, Logprob] | None] | None,
    alone: list[dict[int, Logprob] | None] | None,
    tolerance: float,
    who: str,
) -> None:
    require(len(given or ()) == len(alone or ()), f"{who}: so many logprobs")
    for found, expected in zip(given or (), alone or (), strict=True):
        require((found is None) == (expected is None), f"{who}: the first token has no logprob")
        if not tolerance:
            require(found == expected, f"{who}: {found}, alone {expected}")
            continue
        for token_id in (found or {}).keys() & (expected or {}).keys():
            difference = abs(found[token_id].logprob - expected[token_id].logprob)
            require(difference < tolerance, f"{who}: logprob of {token_id}")
