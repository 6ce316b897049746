"""The front door: `LLM(path).generate(prompts, params)`."""

import contextlib
import threading
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.engine.input_processor import Prompt, as_prompt_list, one_per_prompt
from nanoserve.engine.request import Request
from nanoserve.make_engine import make_engine
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nanoserve.beam_search import BeamSearchOutput, BeamSearchParams
    from nanoserve.streams import Streams
    from nanoserve.tokenizer import Message


class LLM:
    """A model, ready to generate.

    `model` is a checkpoint folder or a GGUF file, the name of one that ships with the package
    ("tiny-qwen3") or of one on the Hugging Face hub ("Qwen/Qwen3-0.6B", or with the file's name
    "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"); `options` are the fields of `EngineConfig`.
    Raises `ValueError` for an unknown option, a value out of range, a name or path that is no
    checkpoint and a checkpoint that cannot be run faithfully.

        with LLM("tiny-qwen3") as llm:
            question = [{"role": "user", "content": "What is a KV cache?"}]
            print(llm.chat(question, SamplingParams(max_tokens=100))[0].outputs[0].text)

    `engine` is the loop underneath, for requests that come and go while others run.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.engine = make_engine(model, options)
        self._trace = contextlib.ExitStack()
        if self.engine.config.trace is not None:
            from nanoserve.trace import start_trace

            self._trace = start_trace(self.engine)
        self._request_ids = map(str, count())
        self._streams: Streams | None = None  # made when the first one is asked for
        self._running: list[str] = []  # ids of the requests of `generate`
        self._lock = threading.RLock()  # one `generate` at a time; other threads wait

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
        one per prompt, the lowest first, and needs `scheduling_policy="priority"`. Requests share
        cached prefixes with those that have the same text as `"cache_salt"` in their prompt.

        Nothing is queued unless every prompt is good; if anything interrupts the work, Ctrl-C
        included, none of these requests stays behind. A request whose own logits processor raises,
        or that has no token to choose because its constraints leave none or the model computes NaN,
        ends with finish reason "error" and the reason as `error`; the others go on.
        """
        prompts = as_prompt_list(prompts)
        params = one_per_prompt("sampling_params", sampling_params, SamplingParams, len(prompts))
        priorities = one_per_prompt("priority", priority, int, len(prompts))
        process, only_final = self.engine.input_processor.process, RequestOutputKind.FINAL_ONLY
        with self._lock:
            self._drop_interrupted()
            if self.engine.has_unfinished_requests():
                raise ValueError("requests are unfinished: step the engine or streams to the end")
            ready = [
                process(next(self._request_ids), prompt, p, value or 0, only_final)
                for prompt, p, value in zip(prompts, params, priorities, strict=True)
            ]
            return self._run(ready, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield what is new after every token; the pieces of text concatenate to the final text.

        Several streams may be read in turn, or in threads: whichever is asked first runs the engine
        for all. A stream that is dropped before its end is aborted. If the request ends with an
        error, that is raised here.
        """
        if self._streams is None:
            from nanoserve.streams import Streams

            self._streams = Streams(self.engine)
        self._streams.check_others()
        kind, request_id = RequestOutputKind.DELTA, next(self._request_ids)
        process = self.engine.input_processor.process
        return self._streams.open(process(request_id, prompt, sampling_params, 0, kind))

    def beam_search(
        self, prompts: Prompt | AbstractSequence[Prompt], params: "BeamSearchParams"
    ) -> "list[BeamSearchOutput]":
        """The best `beam_width` continuations of every prompt; see `nanoserve.beam_search`."""
        from nanoserve.beam_search import beam_search

        return beam_search(self.engine, self.generate, as_prompt_list(prompts), params)

    def chat(
        self,
        messages: "AbstractSequence[Message] | AbstractSequence[AbstractSequence[Message]]",
        sampling_params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        allow_special_tokens: bool = False,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        What messages say is text: a special token that somebody typed, such as "<|im_end|>", is a
        word like others, and control tokens are those that the template writes. vLLM, and
        transformers by default, make control tokens of both, which `allow_special_tokens=True`
        does here, too. `generate` does it with every text: there, the prompt is the template.
        """
        from nanoserve.chat import chat_prompts

        template = {"add_generation_prompt": add_generation_prompt, **chat_template_kwargs}
        prompts = chat_prompts(self.engine, messages, template, allow_special_tokens)
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return self.engine.input_processor.default_sampling_params()

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.engine.stats

    def close(self) -> None:
        """Release weights and KV cache; end the trace. Idempotent, and what leaving `with` does."""
        with self._trace:
            self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, ready: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        finished, outputs = {}, self._outputs()
        if use_tqdm:
            from nanoserve.progress import with_progress

            outputs = with_progress(outputs, len(ready))
        try:
            self._running = [request.request_id for request in ready]
            for request in ready:
                self.engine.add(request)
            for output in outputs:
                finished[output.request_id] = output
        finally:
            self._drop_interrupted()
        return [finished[request.request_id] for request in ready]

    def _drop_interrupted(self) -> None:
        """Leave nothing of a call that was interrupted, were it as it cleared up."""
        if not self.engine.is_stepping:
            self.engine.withdraw(self._running)
            self._running = []
            if self._streams is not None:
                self._streams.drop_dead()

    def _outputs(self) -> Iterator[RequestOutput]:
        """The loop."""
        while self.engine.has_unfinished_requests():
            yield from self.engine.step()
