"""The front door: `LLM(path).generate(prompts, params)`."""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from nanoserve.checkpoints import bundled_checkpoint
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.output_processor import Request
from nanoserve.models.registry import supported_architectures
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams, is_int
from nanoserve.tokenizer import Message, Tokenizer
from nanoserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from nanoserve.beam_search import BeamSearchOutput, BeamSearchParams


class LLM:
    """A model, ready to generate.

    `model` is a checkpoint folder or the name of one that ships with the package ("tiny-qwen3");
    `options` are the fields of `EngineConfig`. Raises `ValueError` for an unknown option, a value
    out of range, a path that is no checkpoint and a checkpoint that cannot be run faithfully.

        with LLM("tiny-qwen3") as llm:
            print(llm.chat([{"role": "user", "content": "What is a KV cache?"}])[0].outputs[0].text)

    `engine` is the loop underneath, for requests that come and go while others run.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        config = EngineConfig.from_options(model, **options)
        path = _checkpoint_folder(config.model)
        model_config = ModelConfig.from_checkpoint(path, config.dtype, supported_architectures())
        # The weights come last: whatever can be refused is refused before they are read.
        tokenizer = None if config.skip_tokenizer_init else Tokenizer(config.tokenizer or path)
        runner = ModelRunner(config, model_config, path)
        self.engine = LLMEngine(config, model_config, runner, tokenizer)
        self._request_ids = map(str, count())
        self._streams: dict[str, deque[RequestOutput]] = {}  # by request: what is not yet read

    def generate(
        self,
        prompts: Prompt | AbstractSequence[Prompt],
        sampling_params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: AbstractSequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the order of the prompts.

        A prompt is text, a list of token ids, or `{"prompt_token_ids": [...]}`. `sampling_params`
        is one for all or one per prompt; None takes the checkpoint's own defaults. `priority` is
        one per prompt, the lowest first, and needs `scheduling_policy="priority"`.

        Nothing is queued unless every prompt is good; if anything interrupts the work, Ctrl-C
        included, none of these requests stays behind.
        """
        prompts = _as_list(prompts)
        params = _one_per_prompt(sampling_params, len(prompts))
        priorities = self._priorities(priority, len(prompts))
        if self.engine.has_unfinished_requests():
            raise ValueError("requests are unfinished: step the engine or its streams to the end")
        ready = [
            self.engine.prepare(next(self._request_ids), prompt, p, value)
            for prompt, p, value in zip(prompts, params, priorities, strict=True)
        ]
        for request in ready:
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
        return self._run(ready, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield what is new after every token; the pieces of text concatenate to the final text.

        Several streams may be read in turn: whichever is asked first runs the engine for all. A
        stream that is dropped before its end is aborted.
        """
        if not set(self.engine.output_processor.requests) <= set(self._streams):
            raise ValueError("requests are unfinished: step the engine to its end first")
        request = self.engine.prepare(next(self._request_ids), prompt, sampling_params)
        request.params.output_kind = RequestOutputKind.DELTA
        self._streams[request.request_id] = deque()
        self.engine.add(request)
        return self._read_stream(request.request_id)

    def beam_search(
        self, prompts: Prompt | AbstractSequence[Prompt], params: "BeamSearchParams"
    ) -> "list[BeamSearchOutput]":
        """The best `beam_width` continuations of every prompt; see `nanoserve.beam_search`."""
        from nanoserve.beam_search import beam_search

        return beam_search(self, _as_list(prompts), params)

    def chat(
        self,
        messages: AbstractSequence[Message] | AbstractSequence[AbstractSequence[Message]],
        sampling_params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("chat() needs a tokenizer, and this engine has none")
        if not messages:
            raise ValueError("messages is empty: there is nothing to answer")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation, add_generation_prompt, **chat_template_kwargs
            )
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, False)})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return self.engine.input_processor.default_sampling_params()

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.engine.stats

    def close(self) -> None:
        """Release weights and KV cache. Idempotent; leaving a `with` block does the same."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _priorities(self, priority: AbstractSequence[int] | None, num_prompts: int) -> list[int]:
        if priority is None:
            return [0] * num_prompts
        if self.engine.config.scheduling_policy != "priority":
            raise ValueError(f"{priority=} needs scheduling_policy='priority'")
        if len(priority) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(priority)} priorities")
        return list(priority)

    def _read_stream(self, request_id: str) -> Iterator[RequestOutput]:
        unread = self._streams[request_id]
        try:
            finished = False
            while not finished:
                while not unread:
                    for output in self.engine.step():
                        self._streams[output.request_id].append(output)
                output = unread.popleft()
                finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            self.engine.abort_request(request_id)

    def _run(self, ready: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        progress = _Progress(len(ready), enabled=use_tqdm)
        try:
            with _InterruptBetweenSteps() as interrupt:
                for request in ready:
                    self.engine.add(request)
                while self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        finished[output.request_id] = output
                        progress.add(output)
                    interrupt.raise_if_requested()
        finally:
            progress.close()
            for request in ready:
                self.engine.abort_request(request.request_id)  # only what did not finish
        return [finished[request.request_id] for request in ready]


def _checkpoint_folder(model: str) -> Path:
    path = bundled_checkpoint(model) or Path(model)
    if not path.is_dir():
        raise ValueError(f"{model!r} is neither a folder nor the name of a bundled checkpoint")
    return path


def _as_list(prompts: Prompt | AbstractSequence[Prompt]) -> list[Prompt]:
    """One prompt or several? A string, a dictionary and a list of integers are one."""
    is_array = isinstance(prompts, np.ndarray) and prompts.ndim > 0
    if not isinstance(prompts, (str, Mapping, AbstractSequence)) and not is_array:
        raise ValueError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and is_int(prompts[0])):
        return [prompts]
    return list(prompts)


def _one_per_prompt(
    params: SamplingParams | AbstractSequence[SamplingParams] | None, num_prompts: int
) -> AbstractSequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, AbstractSequence):
        raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling_params")
    return params


class _Progress:
    """A bar of requests done, with tokens per second in and out."""

    def __init__(self, num_requests: int, enabled: bool) -> None:
        self._bar = tqdm(
            total=num_requests, desc="Requests", disable=not enabled, dynamic_ncols=True
        )
        self._start = time.perf_counter()
        self._num_in = self._num_out = 0

    def add(self, output: RequestOutput) -> None:
        self._num_in += len(output.prompt_token_ids)
        self._num_out += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = time.perf_counter() - self._start
        self._bar.set_postfix_str(
            f"in {self._num_in / seconds:.0f} tok/s, out {self._num_out / seconds:.0f} tok/s",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class _InterruptBetweenSteps:
    """Holds a Ctrl-C back until the step that it falls into is over; a second one goes through.

    Inside a step, an exception could strike between two lines that belong together. Only Python's
    own handler is replaced, and only in the main thread, where signals arrive.
    """

    def __enter__(self) -> "_InterruptBetweenSteps":
        self._requested = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._holds = (
            in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._holds:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, signum: int, frame: object) -> None:
        self._requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_if_requested(self) -> None:
        if self._requested:
            raise KeyboardInterrupt

    def __exit__(self, *exc: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
