"""Runs of a whole engine against a device that does everything as late as it may.

What a request must yield is known without an engine (tests/support/late_executor.py).
"""

import random
from dataclasses import dataclass, field
from typing import Any

from counting_executor import byte_tokenizer, make_engine
from late_executor import Corruption, LateExecutor, LatePipeline, expected_tokens, mix, require

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.kv_groups import group_layers
from nanoserve.engine.request import Request
from nanoserve.engine.sequence_room import SequenceRoom
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.features.parallel.pipeline_schedule import PipelineSchedule
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

LETTERS = [97, 98, 99]  # ids of the byte tokenizer: a, b, c
TOKENIZER = byte_tokenizer()  # one for all runs


class Failure(RuntimeError):
    """The device has broken down in a step."""


@dataclass
class Asked:
    """One request of a run, and what has come of it."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    seed: int
    final: RequestOutput | None = None
    aborted: bool = False
    texts: dict[int, str] = field(default_factory=dict)  # of its deltas, by completion
    token_ids: dict[int, list[int]] = field(default_factory=dict)


class AheadRun:
    """A random engine, random requests, and random misfortunes between and inside its steps."""

    most_requests = 8

    def __init__(
        self, seed: int, ahead: bool, num_stages: int = 1, num_places: int | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.vocab = LETTERS[: rng.randint(1, 3)]
        block_size, max_num_seqs = rng.randint(1, 4), rng.randint(1, 5)
        self.max_model_len = rng.randint(3, 24)
        eos = frozenset({97}) if rng.random() < 0.3 else frozenset()
        self.by_priority = rng.random() < 0.3
        num_spare_blocks = rng.choice([0, 0, 1, 3, 20])
        max_num_batched_tokens = max_num_seqs + rng.choice([0, 1, 3, 10, 40])
        layers = self._choose_windows(random.Random(f"windows {seed}"))
        windows = [group.window for group in group_layers(layers)]
        room = SequenceRoom(windows, block_size, max_num_batched_tokens)
        self.engine: GuardedEngine = make_engine(
            TOKENIZER,
            num_kv_blocks=room.num_blocks(self.max_model_len) + num_spare_blocks,
            eos=eos,
            sliding_windows=layers,
            async_scheduling=ahead,
            pipeline_parallel_size=num_stages,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
            scheduling_policy="priority" if self.by_priority else "fcfs",
            block_size=block_size,
            enable_prefix_caching=rng.random() < 0.9,
        )
        self.failure_rate = rng.choice([0, 0, 0.02, 0.1])
        self.abort_rate = rng.choice([0, 0, 0.02])
        kind = LateExecutor if num_stages == 1 else LatePipeline
        executor = kind(
            self.engine.config,
            self.engine.executor.num_kv_blocks,
            self.vocab,
            self._on_call,
            self.engine.scheduler.block_manager.windows,
        )
        if num_stages > 1:
            self.engine.add_extension(PipelineSchedule(self.engine))
        executor.max_model_len = self.max_model_len
        self.executor = executor
        self.tier = None
        if num_places is not None:
            manager = self.engine.scheduler.block_manager
            self.tier = HostTier(manager, HostPlaces(manager.prefix_cache, num_places))
            self.engine.add_extension(self.tier)
        self._add_extensions()
        self.engine.replace_executor(executor)
        self.engine.output_processor.collectors["prompt_logprobs"] = self._collect
        self.asked = [self._ask(index) for index in range(rng.randint(1, self.most_requests))]
        self.by_id = {asked.request_id: asked for asked in self.asked}
        self.of_prompts: dict[str, list[int]] = {}
        self.most_in_flight = self.num_failures = 0

    def _does_arrive(self) -> bool:
        """Choose whether another request comes before the next step."""
        return self.rng.random() < 0.5

    def _add_extensions(self) -> None:
        """Add what a subclass tests."""

    def _choose_windows(self, rng: random.Random) -> list[int | None]:
        """Choose the windows of layers; every other run has full attention only."""
        if rng.random() < 0.5:
            return [None]
        # The late device reads prefixes from the first group, which is that of the widest window.
        layers = [rng.choice([None, 2, 5, 9]), *rng.choices(range(1, 10), k=rng.randint(0, 2))]
        return [None if w is None or w >= self.max_model_len else w for w in layers]

    def run(self) -> None:
        waiting = list(self.asked)
        for _ in range(4000):
            while waiting and self._does_arrive():
                self._add(waiting.pop(0))
            if not waiting and not self.engine.has_unfinished_requests():
                break
            if self.rng.random() < self.abort_rate:
                self._abort()
            self._step()
        else:
            raise Corruption("livelock: the run does not end")
        self._check_the_end()

    # ------------------------------------------------------------------ the users

    def _ask(self, index: int) -> Asked:
        rng = self.rng
        length = rng.randint(1, self.max_model_len - 1)
        prompt = [rng.choice(self.vocab) for _ in range(length)]
        n = rng.choice([1, 1, 1, 2, 3])
        params = SamplingParams(
            n=n,
            seed=rng.randrange(3),
            repetition_penalty=1.1,  # so that the sampler is told of earlier tokens
            max_tokens=rng.choice([1, 2, 5, None]),
            stop=rng.choice([None, None, "ab", ["ba", "cc"], "aab"]),
            ignore_eos=rng.random() < 0.2,
            stop_token_ids=rng.choice([None, None, [98]]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            output_kind=rng.choice(list(RequestOutputKind)),
        )
        priority = rng.randint(0, 2) if self.by_priority else 0
        return Asked(f"r{index}", prompt, params, priority, params.seed)

    def _add(self, asked: Asked) -> None:
        self.engine.add_request(asked.request_id, asked.prompt, asked.params, asked.priority)

    def _abort(self) -> None:
        live = list(self.engine.output_processor.requests)
        if live:
            asked = self.by_id[self.rng.choice(live)]
            asked.aborted = True
            output = self.engine.abort_request(asked.request_id)
            if output is not None:  # inside a step, it comes with the step's outputs
                self._take(output)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Failure as error:
            self.num_failures += 1
            assert set(error.request_ids) <= set(self.by_id)
            assert not self.engine.plans_under_way
            return
        self.most_in_flight = max(self.most_in_flight, len(self.engine.plans_under_way))
        for output in outputs:
            self._take(output)
        self.engine.scheduler.check()

    def _on_call(self, name: str) -> None:
        """Each call of the executor: somebody aborts a request, or the device fails."""
        if self.rng.random() < self.abort_rate:
            self._abort()
        # Without an end, a long prompt in small chunks would never get through.
        if self.num_failures < 30 and self.rng.random() < self.failure_rate:
            raise Failure(name)

    # ------------------------------------------------------------------ what they get

    def _collect(self, request: Request, row: Any, values: list[int], first: int) -> None:
        got = self.of_prompts.setdefault(request.request_id, [])
        del got[row.start :]
        got += values[first : first + row.num_outputs - row.num_sampled]

    def _take(self, output: RequestOutput) -> None:
        asked = self.by_id[output.request_id]
        require(asked.final is None, "a request was handed out after its last output")
        is_delta = asked.params.output_kind is RequestOutputKind.DELTA
        for completion in output.outputs:
            index = completion.index
            if is_delta:
                asked.texts[index] = asked.texts.get(index, "") + completion.text
                asked.token_ids.setdefault(index, []).extend(completion.token_ids)
            else:
                asked.texts[index] = completion.text
                asked.token_ids[index] = list(completion.token_ids)
            if completion.finished:
                self._check_completion(asked, index, completion.finish_reason)
        if output.finished:
            asked.final = output

    def _check_completion(self, asked: Asked, index: int, reason: str) -> None:
        token_ids, text, expected_reason = self._expected(asked, index)
        got = asked.token_ids[index]
        if reason == "abort":
            require(got == token_ids[: len(got)], f"aborted with {got}, not a part of {token_ids}")
            return
        require(got == token_ids, f"{asked.request_id}/{index}: {got} instead of {token_ids}")
        require(asked.texts[index] == text, f"text {asked.texts[index]!r} instead of {text!r}")
        require(reason == expected_reason, f"{reason} instead of {expected_reason}")

    def _expected(self, asked: Asked, index: int) -> tuple[list[int], str, str]:
        """Tokens, text and finish reason, told from the prompt and the parameters alone."""
        params = asked.params
        room = self.max_model_len - len(asked.prompt)
        longest = room if params.max_tokens is None else min(room, params.max_tokens)
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= self.engine.input_processor.eos_token_ids
        tokens: list[int] = []
        for token in expected_tokens(asked.prompt, asked.seed, index, self.vocab, longest):
            if token in stops:
                return tokens, bytes(tokens).decode(), "stop"
            tokens.append(token)
            text = bytes(tokens).decode()
            found = [text.find(stop) for stop in params.stop_strings if stop in text]
            if found:
                return tokens, text[: min(found)], "stop"
        return tokens, bytes(tokens).decode(), "length"

    def _check_the_end(self) -> None:
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        require(manager.num_free_blocks == manager.num_blocks, "blocks leaked")
        require(not self.engine.output_processor.requests, "a request was lost")
        require(not self.engine.plans_under_way, "a step was never collected")
        scheduler.check()
        for asked in self.asked:
            require(asked.final is not None, f"{asked.request_id} was never handed out")
            if asked.params.prompt_logprobs is not None and not asked.aborted:
                prefix, expected = 0, []
                for token, following in zip(asked.prompt, asked.prompt[1:], strict=False):
                    prefix = mix(prefix, token)
                    expected.append(mix(prefix, following))
                got = self.of_prompts.get(asked.request_id, [])
                require(got == expected, "outputs of a prompt")
