"""`AsyncLLM`: one engine for all tasks of an event loop."""

import asyncio
import atexit
import contextlib
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from collections.abc import Sequence as AbstractSequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanoserve.compat.llm_methods import hugging_face_tokenizer
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.request import Request
from nanoserve.llm import LLM
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.engine_process import EngineProcess
from nanoserve.serve.engine_thread import Done, EngineThread, News
from nanoserve.serve.response_stream import EngineDeadError, EngineOwner, OutputReader
from nanoserve.text.chat import prompts_of
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.utils.checks import check_choice, check_int, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from nanoserve.cli.engine_args import EngineArgs
    from nanoserve.compat.engine_options import EngineOptions
    from nanoserve.features.structured.params import StructuredOutputsParams
    from nanoserve.serve.engine_process import EngineFront
    from nanoserve.text.prompt_types import ChatOptions
    from nanoserve.text.tokenizer import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_CHECKED = 32  # grammars at a time: most wait for one of a `Checker`'s four processes


class AsyncLLM:
    """A model that any number of tasks ask at once; `model` and `options` are those of `LLM`.

        async with AsyncLLM("tiny-qwen3") as llm:
            async for output in llm.generate("What is a KV cache?", SamplingParams(max_tokens=50)):
                print(output.outputs[0].text)

    One thread owns the engine and steps while there is work; with `engine_process=True` it does so
    in another process, whose Python this one does not keep from its work. The event loop is woken
    once a step, for all outputs together. Texts are tokenised in a thread of their own, one after
    another. Tasks of one event loop at a time may use it.

    With `stream_interval`, an output comes only when its request has brought that many tokens more
    than the last one told, and at its first token and its end: less work for each token.
    """

    def __init__(
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
        # By request. Who reads holds the reader; here it must not stay when it is dropped.
        self._readers: weakref.WeakValueDictionary[str, OutputReader] = (
            weakref.WeakValueDictionary()
        )
        self._num_preparing = 0
        self._is_paused = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posted: deque[News | None] = deque()  # and not delivered yet
        self._is_woken = False
        self._calls: set[asyncio.Future[Any]] = set()  # that the engine's thread has not answered
        post = partial(_post_to, weakref.ref(self))  # whoever posts must not keep this alive
        self.owner = self._make_owner(model, engine_process, options, post)
        tokenizer = self.engine.tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        # At exit it is waited for: torch must not be torn down under the engine.
        at_exit = partial(_shut_down, weakref.ref(self))
        atexit.register(at_exit)
        self._end = weakref.finalize(self, _end, self.owner, at_exit)
        self._end.atexit = False

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> "AsyncLLM":
        """As scripts for vLLM make one: of `nanoserve.AsyncEngineArgs`."""
        return cls(engine_args.model, **engine_args.options())

    @property
    def engine(self) -> "GuardedEngine | EngineFront":
        """To look at. What changes it goes through `call_in_engine`; of one in another process, its
        front is here: `config`, `model_config`, `tokenizer`, `input_processor` and `clock`."""
        return self.owner.engine

    @property
    def is_running(self) -> bool:
        return self._end.alive and self.owner.is_running

    @property
    def stall(self) -> str | None:
        """Why the engine is taken for hung, although it has not failed; None if it is not.

        A step that has used no processor time for half a minute, or that takes five minutes, hangs.
        Should it end after all, the engine goes on.
        """
        return self.owner.stall

    @property
    def num_waiting(self) -> int:
        """Sequences that wait although the next step would admit as many as there are slots for."""
        return max(0, self.owner.backlog + self._num_preparing)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as they come, of the kind that `sampling_params.output_kind` says.

        Whoever reads slowly gets what several steps have brought in one output. An iterator that is
        dropped, wherever it is, aborts its request. If the request ends with an error, that is
        raised after its last output. Raises `ValueError` for what `LLM.generate` refuses and for a
        `request_id` that is in use, and `EngineDeadError`; all when the first output is asked for.
        """
        request_id = self.new_request_id() if request_id is None else request_id
        process = self.engine.input_processor.process
        make = partial(process, request_id, prompt, sampling_params, priority)
        return self._outputs_of(make, sampling_params)

    def chat(
        self,
        messages: "AbstractSequence[Message]",
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        **chat_options: "Unpack[ChatOptions]",
    ) -> AsyncIterator[RequestOutput]:
        """The same for a conversation; `chat_options` are as `LLM.chat` has them."""
        request_id = self.new_request_id() if request_id is None else request_id

        def make() -> Request:
            (prompt,) = prompts_of(self.engine, [messages], **chat_options)
            process = self.engine.input_processor.process
            return process(request_id, prompt, sampling_params, priority)

        return self._outputs_of(make, sampling_params)

    def abort(self, request_id: str | Iterable[str]) -> "Awaitable[None]":
        """End requests; their readers get a last output. An id that is unknown is no error.

        What is returned may be awaited, as vLLM's, and need not be.
        """
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self.owner.abort(each)
        return _Done()

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine has failed, was shut down, or hangs in a step."""
        self._check_is_running()
        if self.stall is not None:
            raise EngineDeadError(self.stall)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; see `GuardedEngine.reset_prefix_cache`."""
        await self.call_in_engine(_forget_prefixes)
        return True

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Take no step until `resume_generation`; requests that come meanwhile wait.

        mode: "abort" ends what runs, each with a last output; "keep" lets it go on afterwards,
        where it was. `clear_cache`: after "abort", forget all cached prefixes, as when the weights
        are about to change. vLLM's "wait" is refused: await what you have asked, then pause.
        """
        check_choice("mode", mode, ("abort", "keep"))
        require(not wait_for_inflight_requests, "await what you have asked, and then pause")
        if mode == "abort":
            for request_id in list(self._readers):
                self.abort(request_id)
        self.owner.pause(True)
        self._is_paused = True
        clears = clear_cache and mode == "abort"
        await self.call_in_engine(_forget_prefixes if clears else _do_nothing)  # when all is done

    async def resume_generation(self) -> None:
        """Go on after a pause."""
        self.owner.pause(False)
        self._is_paused = False

    async def is_paused(self) -> bool:
        return self._is_paused

    async def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The checkpoint's tokenizer, as transformers has it. `ValueError` if there is none."""
        return hugging_face_tokenizer(self.engine.tokenizer)

    def new_request_id(self) -> str:
        """One that no other request of this object has."""
        return next(self._request_ids)

    async def prepare(self, make: Callable[[], T], is_large: bool = False) -> T:
        """Return what `make()` returns, called in the thread that tokenises.

        is_large: in the one for what takes long, so that short prompts do not wait behind it.
        """
        pool = self._tokenizing_much if is_large else self._tokenizing
        self._num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, make)
        finally:
            self._num_preparing -= 1

    async def check_guide(self, guide: "StructuredOutputsParams | None") -> None:
        """Raise `ValueError` for what no output can be made to obey.

        To find that out may take as long as a hundred texts take to tokenise, so it has threads of
        its own, in which one slow grammar keeps no other waiting; afterwards it is known.
        """
        if guide is not None:
            processor = self.engine.input_processor
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._checking, processor.check_guide, guide)

    def open(self, requests: list[Request]) -> OutputReader:
        """Queue what `engine.input_processor` made; one task reads all that comes of it."""
        self._check_is_running()
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
        """What `function(engine)` returns, called between two steps by whoever owns the engine.

        With `engine_process`, `function` and what it returns are pickled.
        """
        return await self._told_by(partial(self.owner.call, function))

    async def _told_by(self, ask: Callable[[Done], None]) -> Any:
        """What the `done` is told that `ask` is called with; or that error is raised."""
        self._check_is_running()
        self._join_loop()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if not result.done():
                result.set_result(value) if error is None else result.set_exception(error)

        def done(value: Any, error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, error)

        self._calls.add(result)
        try:
            ask(done)
            return await result
        finally:
            self._calls.discard(result)

    def call_soon(self, function: Callable[[GuardedEngine], Any]) -> None:
        """The same for whoever does not wait for it: before any request that is opened later."""

        def done(_: Any, error: Exception | None) -> None:
            if error is not None:
                logger.error("what was to be done in the engine has failed", exc_info=error)

        self.owner.call(function, done)

    def shutdown(self) -> None:
        """Abort every request, release weights and KV cache. Waits for a step's end; idempotent."""
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
        """Who steps, and calls `post` with what has come of it."""
        if not engine_process:
            return EngineThread(LLM(model, **options), post)
        return EngineProcess(model, options, post)

    async def _outputs_of(
        self, make: Callable[[], Request], sampling_params: SamplingParams | None
    ) -> AsyncIterator[RequestOutput]:
        self._check_is_running()
        if isinstance(sampling_params, SamplingParams):
            await self.check_guide(sampling_params.structured_outputs)
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
        """From here on, outputs go to the event loop that runs."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._readers or self._calls:
                raise RuntimeError("another event loop still reads outputs of this AsyncLLM")
            self._loop, self._is_woken = loop, False

    def _post(self, news: News | None) -> None:
        """In another thread: a step has brought these, or None: there will be no more."""
        self._posted.append(news)
        if self._loop is None or self._is_woken:
            return
        self._is_woken = True  # a loop that is late is woken once, and finds several steps
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # it is closed: nobody reads any more
            self._posted.clear()

    def _deliver(self) -> None:
        """In the event loop: each output goes to whoever reads it, if anybody still does."""
        self._is_woken = False  # first: what is posted from here on may be overlooked below
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
        """The engine has ended: whoever waits for it must not do so for ever."""
        for reader in list(self._readers.values()):
            reader.wake()
        for call in [call for call in self._calls if not call.done()]:
            call.set_exception(EngineDeadError())


class _Done:
    """Awaited, it is over."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def _forget_prefixes(engine: GuardedEngine) -> None:
    engine.reset_prefix_cache()


def _do_nothing(engine: GuardedEngine) -> None:
    """Answered when everything ordered before has been done."""


def _shut_down(llm: "weakref.ref[AsyncLLM]") -> None:
    alive = llm()
    if alive is not None:
        alive.shutdown()


def _end(owner: EngineOwner, at_exit: Callable[[], None]) -> None:
    """What is left to do for an `AsyncLLM` that nobody has any more."""
    owner.stop()
    atexit.unregister(at_exit)


def _post_to(llm: "weakref.ref[AsyncLLM]", news: News | None) -> None:
    alive = llm()
    if alive is not None:
        alive._post(news)
