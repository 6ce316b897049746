"""An engine in a process of its own: whoever serves it does not share its interpreter.

Python computes in one thread of a process at a time. Where a step of the engine takes milliseconds,
the texts and events of 256 streams would take as long again. Here they are made beside it.

Two pipes carry pickles between the two processes, which trust each other: orders one way, news the
other. Among the news are beats: a process that is silent, as one that was stopped is, is killed,
and each of its clients told. It is started as `python -m nanoserve.serve.engine_process`, so that
a plain script needs no `if __name__ == "__main__"`, and ends with whoever has started it, however
that ends.
"""

import contextlib
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import InputProcessor
from nanoserve.engine.request import Request
from nanoserve.features.parallel.heartbeat import BEAT, WORK_LIMIT, Pulse, beat_for_ever
from nanoserve.llm import LLM
from nanoserve.outputs import RequestOutput
from nanoserve.serve.engine_thread import Done, EngineThread, News
from nanoserve.serve.token_stream import NewTokens
from nanoserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_IMPORT_TIMEOUT = 120.0  # seconds of silence before the first beat, as from a slow disk
_END_TIMEOUT = 10.0  # seconds that Python may take to end, when nothing more comes of it
_ORPHAN_TIMEOUT = 10.0  # seconds that a step may still take when nobody waits for it


class EngineFront:
    """What is known here of an engine elsewhere: enough to make requests for it."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
    ) -> None:
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        # Both processes read the same clock, so that times can be compared.
        self.clock = time.perf_counter
        self.input_processor = InputProcessor(
            config, model_config, tokenizer, max_model_len, self.clock
        )


class EngineProcess:
    """What `EngineThread` is, of an engine in a process of its own.

    Raises what `LLM(model, **options)` raises.
    """

    def __init__(
        self, model: str | Path, options: dict[str, Any], post: Callable[[News | None], None]
    ) -> None:
        self.error: BaseException | None = None
        self.is_running = True
        self._post = post
        self.stall: str | None = None  # why it is taken for hung, though it lives
        self._backlog = self._num_sent = self._num_received = 0
        self._num_heard = 0  # messages, beats among them
        self._timeout = float(EngineConfig.worker_timeout_seconds)
        self._is_over = threading.Event()
        self._calls: dict[int, Done] = {}
        self._call_numbers = count()
        # A finalizer may give an order at any moment, in the middle of another one included.
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        theirs, orders = Pipe(duplex=False)
        self._news, ours = Pipe(duplex=False)
        files = (theirs.fileno(), ours.fileno())
        command = [sys.executable, "-m", __name__, *map(str, files)]
        self._process = subprocess.Popen(command, pass_fds=files)
        theirs.close()
        ours.close()
        self._start("nanoserve orders", self._write, orders)
        self._start("nanoserve watch", self._watch)
        self._send("load", model, options, logging.getLogger().getEffectiveLevel())
        try:
            self.engine = EngineFront(*self._first_words())
            self._timeout = float(self.engine.config.worker_timeout_seconds)
        except BaseException:
            self._is_over.set()
            self._orders.put(None)
            self._process.kill()
            self._process.wait()
            raise
        self._start("nanoserve news", self._listen)

    @property
    def backlog(self) -> int:
        """As the engine has told last, and what was sent since."""
        return self._backlog + self._num_sent - self._num_received

    def add(self, request: Request, is_followed: bool) -> None:
        self._send("add", request, is_followed)
        self._num_sent += len(request.sequences)

    def abort(self, request_id: str) -> None:
        self._send("abort", request_id)

    def pause(self, is_paused: bool) -> None:
        self._send("pause", is_paused)

    def call(self, function: Callable[[GuardedEngine], Any], done: Done) -> None:
        number, function = next(self._call_numbers), pickle.dumps(function)  # or raise
        self._calls[number] = done
        self._send("call", number, function)

    def stop(self) -> None:
        self._send("stop")

    def join(self) -> None:
        """Wait for the end of the process; one that hangs in a step is killed."""
        while self._wait(BEAT) is None:
            if self.stall is not None:
                self._process.kill()

    def _wait(self, timeout: float) -> int | None:
        """Its exit status; None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def _send(self, *order: Any) -> None:
        self._orders.put(pickle.dumps(order))

    def _start(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name=name, daemon=True).start()

    def _write(self, pipe: Connection) -> None:
        """Carry orders to the pipe, until there are no more."""
        with pipe:
            while (content := self._orders.get()) is not None:
                with contextlib.suppress(OSError):  # it has ended, which `_listen` is told, too
                    pipe.send_bytes(content)

    def _receive(self) -> Any:
        """The next message that is no beat. Raises `EOFError` when there will be none."""
        while True:
            kind, *told = pickle.loads(self._news.recv_bytes())
            self._num_heard += 1
            if kind != "beat":
                return kind, *told
            (self.stall,) = told

    def _first_words(self) -> Any:
        try:
            kind, told = self._receive()
        except EOFError:
            status = self._process.wait()
            died = RuntimeError(f"the engine's process has ended with status {status}")
            raise self.error or died from None
        if kind == "failed":
            raise told
        return pickle.loads(told)

    def _watch(self) -> None:
        """Kill a process that shows no sign of life; its pipe then ends, which `_listen` notes.

        One that computes and does not beat, as in compiled code that holds Python's lock, lives.
        After a while it is taken for hung.
        """
        pulse, num_heard, unheard = Pulse(self._process.pid), 0, 0.0
        looked = time.monotonic()
        while not self._is_over.wait(BEAT):
            now = time.monotonic()
            elapsed, looked = now - looked, now
            is_heard, num_heard = num_heard != self._num_heard, self._num_heard
            pulse.look(elapsed, is_heard)
            unheard = 0.0 if is_heard else unheard + min(elapsed, 2 * BEAT)
            if num_heard and unheard >= WORK_LIMIT:
                self.stall = f"the engine's process has not been heard for {unheard:.0f} seconds"
            # Two beats pass before silence is one: it is found within the time that was given.
            if pulse.silence >= (self._timeout - 2 * BEAT if num_heard else _IMPORT_TIMEOUT):
                self.error = RuntimeError(
                    f"the engine's process {pulse.pid} has shown no sign of life for "
                    f"{pulse.silence:.0f} seconds, as if it were stopped, and is killed"
                )
                self._process.kill()
                return

    def _listen(self) -> None:
        """Pass on what comes, until nothing comes any more."""
        try:
            while True:
                kind, *told = self._receive()
                if kind == "news":
                    tokens, outputs, self._backlog, self._num_received = told
                    self._post(News([NewTokens(*new) for new in tokens], outputs))
                elif kind == "result":
                    number, value, error = told
                    self._calls.pop(number)(value, error)
                else:
                    (self.error,) = told
        except (EOFError, OSError):
            pass  # it has ended
        except Exception as error:  # an answer that cannot be read, say
            self.error = error
        finally:
            self._is_over.set()
            self._orders.put(None)  # it closes the pipe, the last thing that the process waits for
            status = self._wait(1.0)  # of one that was killed it is there at once
            if status and self.error is None:
                self.error = RuntimeError(f"the engine's process has ended with status {status}")
            self.is_running = False
            self._post(None)
            if status is None and self._wait(_END_TIMEOUT) is None:
                self._process.kill()
                self._process.wait()


class _Sender:
    """Sends what a thread of its own finds; the engine never waits for a pipe that is full.

    Until that is sent, further tokens of a sequence join those that wait.
    """

    def __init__(self, news: Connection) -> None:
        self._pipe = news
        self._lock = threading.Condition()
        self._tokens: dict[tuple[str, int], NewTokens] = {}
        self._outputs: list[Any] = []
        self._others: list[tuple[Any, ...]] = []
        self._is_over = self._is_beat_due = False
        self._engine_thread: EngineThread | None = None
        self._num_received = 0  # sequences
        self._thread = threading.Thread(target=self._run, name="nanoserve sender")
        self._thread.start()

    def start_engine(self, llm: LLM) -> EngineThread:
        """Run an engine in a thread of its own, whose news are sent from now on."""
        self._engine_thread = EngineThread(llm, self.post)
        return self._engine_thread

    def count_received(self, num_sequences: int) -> None:
        """Add to the number of sequences of which the other process learns that they are here."""
        self._num_received += num_sequences

    def post(self, news: News | None) -> None:
        with self._lock:
            if news is None:
                self._others.append(("error", self._engine_thread.error))
                self._is_over = True
            else:
                for new in news.tokens:
                    key = new.request_id, new.index
                    earlier = self._tokens.get(key)
                    if earlier is not None:
                        new = new._replace(token_ids=earlier.token_ids + new.token_ids)
                    self._tokens[key] = new
                self._outputs += news.outputs
            self._lock.notify()

    def tell(self, *told: Any) -> None:
        """Something that is no news of requests."""
        with self._lock:
            self._others.append(told)
            self._lock.notify()

    def beat(self) -> None:
        """Send a sign of life. While the pipe is full, one is enough. `OSError` after the end."""
        with self._lock:
            if self._is_over:
                raise OSError("nothing more is sent")
            self._is_beat_due = True
            self._lock.notify()

    def end(self) -> None:
        """Send what there is, and then close the pipe."""
        with self._lock:
            self._is_over = True
            self._lock.notify()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send_all()
        except OSError:
            pass  # nobody is there any more
        finally:
            self._pipe.close()  # else an error here would leave the others waiting

    def _send_all(self) -> None:
        is_over = False
        while not is_over:
            with self._lock:
                while not (self._tokens or self._outputs or self._others or self._is_over):
                    if self._is_beat_due:
                        break
                    self._lock.wait()
                if self._is_beat_due:
                    thread, self._is_beat_due = self._engine_thread, False
                    self._others.append(("beat", thread and thread.stall))
                tokens, self._tokens = list(map(tuple, self._tokens.values())), {}
                outputs, self._outputs = self._outputs, []
                others, self._others = self._others, []
                is_over = self._is_over
            for told in others:
                self._pipe.send_bytes(pickled(told))
            for some_tokens, some_outputs in _parts(tokens, outputs):
                load = self._engine_thread.backlog, self._num_received
                self._pipe.send_bytes(pickled(("news", some_tokens, some_outputs, *load)))


def _parts(tokens: list[Any], outputs: list[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Split news into messages. An output with log-probabilities is thousands of objects, and
    whoever unpickles it holds its interpreter's lock until all of the message is there."""
    large = [output for output in outputs if output.prompt_logprobs]
    small = [output for output in outputs if not output.prompt_logprobs]
    parts = [(tokens, small)] if tokens or small else []
    return parts + [([], [output]) for output in large]


def pickled(told: tuple[Any, ...]) -> bytes:
    """Errors may hold what cannot be pickled: then it is their text that counts."""
    try:
        return pickle.dumps(told)
    except Exception:
        return pickle.dumps(tuple(map(_without_objects, told)))


def _without_objects(value: Any) -> Any:
    if isinstance(value, BaseException):
        return RuntimeError(repr(value))
    if isinstance(value, list):
        return [
            replace(output, error=output.error and RuntimeError(repr(output.error)))
            if isinstance(output, RequestOutput)
            else output
            for output in value
        ]
    return value


def _main(orders: Connection, news: Connection) -> None:
    """The process: load, obey, end."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # which a terminal, or a supervisor, sends to all
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    sender = _Sender(news)
    threading.Thread(target=beat_for_ever, args=(sender.beat,), daemon=True).start()
    try:
        _serve(orders, sender)
    finally:
        sender.end()
        sender.join()


def _serve(orders: Connection, sender: _Sender) -> None:
    _, model, options, level = pickle.loads(orders.recv_bytes())
    logging.basicConfig(level=level, format=LOG_FORMAT)
    try:
        llm = LLM(model, **options)
    except Exception as error:
        sender.tell("failed", error)
        return
    gc.collect()
    gc.freeze()  # what is loaded stays; to look through all of it again would take 200 ms
    engine = llm.engine
    told = (engine.config, engine.model_config, engine.tokenizer)
    sender.tell("ready", pickle.dumps((*told, engine.input_processor.max_model_len)))
    thread = sender.start_engine(llm)
    timeout = None
    try:
        _obey(orders, thread, sender)
    except EOFError:
        timeout = _ORPHAN_TIMEOUT  # whoever gave the orders has ended
    finally:
        thread.stop()
        if not thread.join(timeout):
            os._exit(1)  # nothing else ends a step that hangs


def _obey(orders: Connection, thread: EngineThread, sender: _Sender) -> None:
    while True:
        name, *told = pickle.loads(orders.recv_bytes())
        if name == "add":
            sender.count_received(len(told[0].sequences))
            thread.add(*told)
        elif name == "abort":
            thread.abort(*told)
        elif name == "pause":
            thread.pause(*told)
        elif name == "call":
            number, function = told
            thread.call(partial(_call, function), partial(sender.tell, "result", number))
        else:
            return


def _call(function: bytes, engine: GuardedEngine) -> Any:
    """Unpickled only here, so that one that cannot be is an error like others."""
    return pickle.loads(function)(engine)


if __name__ == "__main__":
    _main(*(Connection(int(number)) for number in sys.argv[1:]))
