"""`AsyncLLM`, an engine that all tasks of an event loop share."""

import asyncio
import atexit
import contextlib
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanoserve.compat.llm_methods import hugging_face_tokenizer
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.pause import check_pause_options
from nanoserve.engine.request import Request
from nanoserve.features.collective_rpc import FunctionCall, call_on_ranks, check_call
from nanoserve.llm import LLM
from nanoserve.lora_request import LoRARequest
from nanoserve.outputs import PoolingRequestOutput, RequestOutput
from nanoserve.pooling_params import PoolingParams
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.engine_process import EngineProcess
from nanoserve.serve.engine_thread import (
    Done,
    EngineAsleepError,
    EngineDeadError,
    EngineThread,
    News,
)
from nanoserve.serve.response_stream import EngineOwner, OutputReader
from nanoserve.text.chat import prompts_of
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.utils.checks import check_choice, check_int, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from nanoserve.cli.engine_args import EngineArgs
    from nanoserve.compat.engine_options import EngineOptions
    from nanoserve.features.structured.params import StructuredOutputsParams
    from nanoserve.features.weight_update import Source
    from nanoserve.serve.engine_process import EngineFront
    from nanoserve.text.prompt_types import ChatOptions
    from nanoserve.text.tokenizer import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_CHECKED = 32  # grammars checked at a time; most wait for one of a `Checker`'s four processes


class AsyncLLM:
    """An asynchronous engine for concurrent requests. It takes the same arguments as `LLM`.

        async with AsyncLLM("tiny-qwen3") as llm:
            async for output in llm.generate("What is a KV cache?", SamplingParams(max_tokens=50)):
                print(output.outputs[0].text)

    One thread owns the engine and steps while there is work. With `engine_process=True` that thread
    runs in another process, so that it does not compete for this process's interpreter lock (GIL).
    The event loop is woken once per step, for all outputs together. Prompts are tokenized one at a
    time, in a separate thread. Only tasks of one event loop at a time may use the object.

    stream_interval: number of new tokens between two outputs of a request. The first token and the
    end of a request are always output at once. A larger interval reduces the overhead per token.
    """

    def __init__(  # type: ignore[misc]  # vLLM has an option `stream_interval`, too
        self,
        model: str | Path,
        engine_process: bool = False,
        stream_interval: int = 1,
        **options: "Unpack[EngineOptions]",
    ) -> None:
        self._stream_interval = check_int("stream_interval", stream_interval, 1)
        self._request_ids = map("request-{}".format, count())
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="nanoserve tokenizer")
        self._tokenizing_much = ThreadPoolExecutor(1, thread_name_prefix="nanoserve tokenizer 2")
        self._checking = ThreadPoolExecutor(_MOST_CHECKED, thread_name_prefix="nanoserve checks")
        # By request id. Weak references, so that a reader that its task drops is collected.
        self._readers: weakref.WeakValueDictionary[str, OutputReader] = (
            weakref.WeakValueDictionary()
        )
        self._num_preparing = 0
        self._is_paused = False
        self._refusal: str | None = None  # why requests are rejected, while the engine sleeps
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posted: deque[News | None] = deque()  # not delivered yet
        self._is_woken = False
        self._calls: set[asyncio.Future[Any]] = set()  # calls in the engine without a result yet
        post = partial(_post_to, weakref.ref(self))  # the engine's thread must not keep this alive
        self.owner = self._make_owner(model, engine_process, options, post)
        tokenizer = self.engine.tokenizer
        # For streams that are made of tokens alone; with routes, all outputs are the engine's own.
        has_streams_of_tokens = (
            tokenizer is not None and not self.engine.config.enable_return_routed_experts
        )
        self._detokenizer = Detokenizer(tokenizer) if has_streams_of_tokens else None
        # At exit, wait for the engine, because torch must not be torn down while it runs.
        at_exit = partial(_shut_down, weakref.ref(self))
        atexit.register(at_exit)
        self._end = weakref.finalize(self, _end, self.owner, at_exit)
        self._end.atexit = False

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> "AsyncLLM":
        """Create an engine from `nanoserve.AsyncEngineArgs`, as vLLM does."""
        return cls(engine_args.model, **engine_args.options())

    @property
    def engine(self) -> "GuardedEngine | EngineFront":
        """The engine, for reading only; use `call_in_engine` to change it.

        With an engine in another process this is an `EngineFront`, which has only `config`,
        `model_config`, `tokenizer`, `input_processor` and `clock`.
        """
        return self.owner.engine

    @property
    def is_running(self) -> bool:
        return self._end.alive and self.owner.is_running

    @property
    def stall(self) -> str | None:
        """Reason why the engine is considered hung; None if it is not.

        A step hangs if it has used no CPU time for 30 seconds or has run for five minutes. If it
        ends after all, the engine continues.
        """
        return self.owner.stall

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences beyond those that the next step has free slots for."""
        return max(0, self.owner.backlog + self._num_preparing)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request. `sampling_params.output_kind` sets their kind.

        lora_request: its adapter, which needs `enable_lora=True`.
        trace_headers: `traceparent` and `tracestate` of an HTTP request, for the parent of the
            span with `otlp_traces_endpoint`.

        If the caller reads slowly, the tokens of several steps are merged into one output. Dropping
        the iterator aborts the request. If the request fails, its error is raised after its last
        output.

        When the first output is requested, raises `ValueError` for arguments that `LLM.generate`
        rejects and for a `request_id` that is in use, and `EngineDeadError` if the engine is not
        running.
        """
        request_id = self.new_request_id() if request_id is None else request_id

        def make() -> Request:
            process = self.engine.input_processor.process
            request = process(
                request_id, prompt, sampling_params, priority, lora_request=lora_request
            )
            request.trace_headers = dict(trace_headers or {})
            return request

        return self._outputs_of(make, sampling_params)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """Yield the result of a pooling request, once: see `LLM.encode`.

        Raises `ValueError` for arguments that `LLM.encode` rejects, and as `generate` does. The
        error of a request that fails is raised.
        """
        from nanoserve.features.pooling.requests import pooling_request
        from nanoserve.features.pooling.results import pooling_output

        request_id = self.new_request_id() if request_id is None else request_id

        def make() -> Request:
            request = pooling_request(
                self.engine, request_id, prompt, pooling_params, priority, lora_request
            )
            request.trace_headers = dict(trace_headers or {})
            return request

        outputs: Any = self._outputs_of(make, None)
        async with contextlib.aclosing(outputs):  # if the caller stops, the request is aborted
            async for output in outputs:
                yield pooling_output(output)

    def chat(
        self,
        messages: "AbstractSequence[Message]",
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **chat_options: "Unpack[ChatOptions]",
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs for a conversation, like `generate`.

        chat_options: see `LLM.chat`.
        """
        request_id = self.new_request_id() if request_id is None else request_id

        def make() -> Request:
            (prompt,) = prompts_of(self.engine, [messages], **chat_options)
            process = self.engine.input_processor.process
            return process(request_id, prompt, sampling_params, priority, lora_request=lora_request)

        return self._outputs_of(make, sampling_params)

    def abort(self, request_id: str | Iterable[str]) -> "Awaitable[None]":
        """Abort requests; their readers receive a last output. Unknown ids are ignored.

        The result may be awaited, as in vLLM, but need not be.
        """
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self.owner.abort(each)
        return _Done()

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine has failed, was shut down, or hangs in a step."""
        self._check_is_running()
        if self.stall is not None:
            raise EngineDeadError(self.stall)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Evict all blocks of the prefix cache; see `GuardedEngine.reset_prefix_cache`."""
        options = reset_running_requests, reset_connector
        await self.call_in_engine(methodcaller("reset_prefix_cache", *options))
        return True

    async def sleep(self, level: int = 1, *, mode: str = "abort") -> None:
        """Release the memory of the KV cache and of the weights until `wake_up`: see `LLM.sleep`.

        Running requests are aborted, each with a last output, and new ones raise
        `EngineAsleepError`. mode: "abort" is supported only.

        Raises `ValueError` for other modes, and where `LLM.sleep` does; the engine is then awake.
        """
        check_choice("mode", mode, ("abort",))
        before = self._refusal
        self._refusal = before or "this engine is about to sleep: wake_up() first"
        try:
            if before is None:
                for request_id in list(self._readers):
                    self.abort(request_id)
            self._refusal = await self._call_llm(partial(_sleep, level))
        except BaseException:
            self._refusal = before
            raise

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Resume after `sleep`: see `LLM.wake_up`. Requests are accepted once all parts are back.

        Raises `ValueError` where `LLM.wake_up` does.
        """
        self._refusal = await self._call_llm(partial(_wake_up, tags))

    async def is_sleeping(self) -> bool:
        """Return True from `sleep` until all parts have been woken."""
        return self._refusal is not None

    def check_awake(self) -> None:
        """Raise `EngineAsleepError` if the engine sleeps."""
        if self._refusal is not None:
            raise EngineAsleepError(self._refusal)

    async def update_weights(
        self, source: "Source", *, mode: str | None = None, version: int | str | None = None
    ) -> int | str:
        """Replace all weights between two steps; return their version. See `LLM.update_weights`.

        With `engine_process=True`, `source` is pickled: pass a folder. During the update no request
        makes progress. An engine whose weights are asleep wakes them with the new ones.

        Raises `ValueError` as `LLM.update_weights` does, and for mode "wait".
        """
        require(mode != "wait", "mode='wait' is not supported: await the requests, then update")
        update = partial(_update_weights, source=source, mode=mode, version=version)
        result, self._refusal = await self._call_llm(update)
        return result

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: AbstractSequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a registered function on every rank between two steps: see `LLM.collective_rpc`.

        With `engine_process=True`, it is registered in this process and imported in that one.
        """
        call = check_call(method, timeout, args, kwargs)
        return await self._call_llm(partial(_collective_rpc, call))

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Take no step until `resume_generation`; requests that arrive meanwhile wait.

        mode: "abort" ends running requests, each with a last output. "keep" continues them where
        they stopped when generation resumes.
        clear_cache: after "abort", evict all blocks of the prefix cache, which is required before
        the weights change.

        Raises `ValueError` for vLLM's `wait_for_inflight_requests`, which is not supported.
        """
        check_pause_options(mode, wait_for_inflight_requests)
        if mode == "abort":
            for request_id in list(self._readers):
                self.abort(request_id)
        self.owner.pause(True)
        self._is_paused = True
        clears = clear_cache and mode == "abort"
        await self.call_in_engine(_forget_prefixes if clears else _do_nothing)  # after the commands

    async def resume_generation(self) -> None:
        """Resume stepping after `pause_generation`."""
        self.owner.pause(False)
        self._is_paused = False

    async def is_paused(self) -> bool:
        return self._is_paused

    async def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the checkpoint's tokenizer as a transformers object.

        Raises `ValueError` if the engine has none.
        """
        return hugging_face_tokenizer(self.engine.tokenizer)

    def new_request_id(self) -> str:
        """Return a request id that no other request of this object has."""
        return next(self._request_ids)

    async def prepare(self, make: Callable[[], T], is_large: bool = False) -> T:
        """Call `make()` in the tokenizing thread and return its result.

        is_large: use a second thread for long work, so that short prompts do not wait for it.
        """
        pool = self._tokenizing_much if is_large else self._tokenizing
        self._num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, make)
        finally:
            self._num_preparing -= 1

    async def check_constraint(self, constraint: "StructuredOutputsParams | None") -> None:
        """Raise `ValueError` for a structured output constraint that cannot be compiled.

        A check may take as long as tokenizing a hundred prompts, so checks have their own threads,
        in which a slow grammar does not delay other grammars. Results are cached.
        """
        if constraint is not None:
            processor = self.engine.input_processor
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._checking, processor.check_constraint, constraint)

    def open(self, requests: list[Request]) -> OutputReader:
        """Queue requests made by `engine.input_processor`; return the reader of their outputs.

        Raises `ValueError` for a `request_id` that is in use, `EngineAsleepError` if the engine
        sleeps, and `EngineDeadError` if it is not running.
        """
        self._check_is_running()
        self.check_awake()
        self._join_loop()
        for request in requests:
            if request.request_id in self._readers:
                raise ValueError(f"request_id={request.request_id!r} is already in use")
        reader = OutputReader(self.owner, requests, self._detokenizer, self._stream_interval)
        for request in requests:
            self._readers[request.request_id] = reader
            self.owner.add(request, reader.follows(request))
        return reader

    async def call_in_engine(self, function: Callable[[GuardedEngine], T]) -> T:
        """Call `function(engine)` between two steps, in the engine's thread; return its result.

        With `engine_process=True`, `function` and its result are pickled.
        """
        return await self._result_of(partial(self.owner.call, function))

    async def _call_llm(self, function: Callable[[LLM], T]) -> T:
        """Call `function(llm)` like `call_in_engine`, with the `LLM` that has the engine."""
        return await self._result_of(partial(self.owner.call_llm, function))

    async def _result_of(self, start: Callable[[Done], None]) -> Any:
        """Call `start(done)`; return the value that `done` receives later, or raise its error."""
        self._check_is_running()
        self._join_loop()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if not result.done():
                result.set_result(value) if error is None else result.set_exception(error)

        def done(value: Any, error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(settle, value, error)

        self._calls.add(result)
        try:
            start(done)
            return await result
        finally:
            self._calls.discard(result)

    def call_soon(self, function: Callable[[GuardedEngine], Any]) -> None:
        """Call `function(engine)` like `call_in_engine`, but without waiting for its result.

        The call precedes all requests that are opened later. An error is logged.
        """

        def done(_: Any, error: Exception | None) -> None:
            if error is not None:
                logger.error("a function called in the engine has failed", exc_info=error)

        self.owner.call(function, done)

    def shutdown(self) -> None:
        """Abort all requests and release weights and KV cache. Waits for a running step.

        Idempotent.
        """
        self._end()
        self.owner.join()
        self._tokenizing.shutdown()
        self._tokenizing_much.shutdown()
        self._checking.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)

    def _make_owner(
        self,
        model: str | Path,
        engine_process: bool,
        options: dict[str, Any],
        post: Callable[[News | None], None],
    ) -> EngineOwner:
        """Return an owner of the engine, which steps it and calls `post` with the updates."""
        if not engine_process:
            return EngineThread(LLM(model, **options), post)
        return EngineProcess(model, options, post)

    async def _outputs_of(
        self, make: Callable[[], Request], sampling_params: SamplingParams | None
    ) -> AsyncIterator[RequestOutput]:
        self._check_is_running()
        if isinstance(sampling_params, SamplingParams):
            await self.check_constraint(sampling_params.structured_outputs)
        reader = self.open([await self.prepare(make)])
        try:
            while not reader.is_over:
                for output in await reader.read():
                    yield output
                    if output.error is not None:
                        raise output.error
        finally:
            reader.close()

    def _check_is_running(self) -> None:
        if not self.is_running:
            raise EngineDeadError from self.owner.error

    def _join_loop(self) -> None:
        """Deliver outputs to the running event loop from now on.

        Raises `RuntimeError` while tasks of another loop still read outputs.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._readers or self._calls:
                raise RuntimeError("another event loop still reads outputs of this AsyncLLM")
            self._loop, self._is_woken = loop, False

    def _post(self, news: News | None) -> None:
        """Receive the updates of a step, in the owner's thread; None is the end of all updates."""
        self._posted.append(news)
        if self._loop is None or self._is_woken:
            return
        self._is_woken = True  # a busy loop is woken once, and then finds updates of several steps
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, so no task reads
            self._posted.clear()

    def _deliver(self) -> None:
        """Pass posted updates to their readers, in the event loop; without a reader, drop them."""
        self._is_woken = False  # first: the loop below may miss updates that are posted from now on
        while self._posted:
            news = self._posted.popleft()
            if news is None:
                self._note_end()
                return
            for new in news.tokens:
                reader = self._readers.get(new.request_id)
                if reader is not None:
                    reader.take_tokens(new)
            for output in news.outputs:
                reader = self._readers.get(output.request_id)
                if reader is not None:
                    reader.take(output)

    def _note_end(self) -> None:
        """Wake all readers and fail all calls, because the engine has ended."""
        for reader in list(self._readers.values()):
            reader.wake()
        for call in [call for call in self._calls if not call.done()]:
            call.set_exception(EngineDeadError())


class _Done:
    """Awaitable that is already done."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def _sleep(level: int, llm: LLM) -> str | None:
    """Put an engine to sleep; return why it rejects requests now."""
    llm.sleep(level)
    return llm.engine.refusal


def _wake_up(tags: list[str] | None, llm: LLM) -> str | None:
    """Wake parts of an engine; return why it still rejects requests, or None."""
    llm.wake_up(tags)
    return llm.engine.refusal


def _forget_prefixes(engine: GuardedEngine) -> None:
    engine.reset_prefix_cache()


def _update_weights(
    llm: LLM, *, source: "Source", mode: str | None, version: int | str | None
) -> tuple[int | str, str | None]:
    """Replace the weights; return their version, and why the engine rejects requests, or None."""
    return llm.update_weights(source, mode=mode, version=version), llm.engine.refusal


def _collective_rpc(call: FunctionCall, llm: LLM) -> list[Any]:
    return call_on_ranks(llm.engine, call)


def _do_nothing(engine: GuardedEngine) -> None:
    """Do nothing. The call returns once all earlier commands have been executed."""


def _shut_down(llm: "weakref.ref[AsyncLLM]") -> None:
    alive = llm()
    if alive is not None:
        alive.shutdown()


def _end(owner: EngineOwner, at_exit: Callable[[], None]) -> None:
    """Stop the engine of an `AsyncLLM` that was shut down or collected."""
    owner.stop()
    atexit.unregister(at_exit)


def _post_to(llm: "weakref.ref[AsyncLLM]", news: News | None) -> None:
    alive = llm()
    if alive is not None:
        alive._post(news)
