"""Run an engine in a separate process, which does not share the server's interpreter lock (GIL).

Python executes one thread of a process at a time. Where a step of the engine takes milliseconds,
converting the tokens of 256 streams to text and events takes about as long again. With two
processes, the two run in parallel.

The processes exchange pickles, and so trust each other. One pipe carries commands and another one
updates. The updates include heartbeats: an engine process that sends none, for example because a
signal stopped it, is killed, and its clients receive an error. The process is started as `python -m
nanoserve.serve.engine_process`, so that a plain script needs no `if __name__ == "__main__"`. It
ends when its parent process ends, for whatever reason.
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
from nanoserve.serve.engine_thread import Done, EngineDeadError, EngineThread, News
from nanoserve.serve.token_stream import NewTokens
from nanoserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_IMPORT_TIMEOUT = 120.0  # seconds of silence before the first heartbeat; imports may be slow
_END_TIMEOUT = 10.0  # seconds that the interpreter may take to exit after its last message
_ORPHAN_TIMEOUT = 10.0  # seconds that a step may still take after the parent process has ended


class EngineFront:
    """A local stand-in for an engine in another process, sufficient to create requests for it."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
    ) -> None:
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        # Both processes read the same clock, so their times are comparable.
        self.clock = time.perf_counter
        self.input_processor = InputProcessor(
            config, model_config, tokenizer, max_model_len, self.clock
        )


class EngineProcess:
    """Owns an engine in another process, with the interface of `EngineThread`.

    Raises the same errors as `LLM(model, **options)`.
    """

    def __init__(
        self, model: str | Path, options: dict[str, Any], post: Callable[[News | None], None]
    ) -> None:
        self.error: BaseException | None = None
        self.is_running = True
        self._post = post
        self.stall: str | None = None  # reason why the live process is considered hung
        self._backlog = self._num_sent = self._num_received = 0
        self._num_messages = 0  # received, including heartbeats
        self._timeout = float(EngineConfig.worker_timeout_seconds)
        self._is_over = threading.Event()
        self._calls: dict[int, Done] = {}
        self._call_numbers = count()
        # A finalizer may send a command at any moment, even while another command is being sent.
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
            self.engine = EngineFront(*self._receive_front())
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
        """The backlog that the engine last reported, plus the sequences sent since then."""
        return self._backlog + self._num_sent - self._num_received

    def add(self, request: Request, is_followed: bool) -> None:
        self._send("add", request, is_followed)
        self._num_sent += len(request.sequences)

    def abort(self, request_id: str) -> None:
        self._send("abort", request_id)

    def pause(self, is_paused: bool) -> None:
        self._send("pause", is_paused)

    def call(self, function: Callable[[GuardedEngine], Any], done: Done) -> None:
        self._send_call("call", function, done)

    def call_llm(self, function: Callable[[LLM], Any], done: Done) -> None:
        self._send_call("call_llm", function, done)

    def _send_call(self, name: str, function: Callable[..., Any], done: Done) -> None:
        # Pickle first, so that no call is registered if pickling raises.
        number, content = next(self._call_numbers), pickle.dumps(function)
        self._calls[number] = done
        self._send(name, number, content)

    def stop(self) -> None:
        self._send("stop")

    def join(self) -> None:
        """Wait until the process has ended; kill it if it hangs in a step."""
        while self._wait(BEAT) is None:
            if self.stall is not None:
                self._process.kill()

    def _wait(self, timeout: float) -> int | None:
        """Return the exit status of the process; None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def _send(self, *order: Any) -> None:
        self._orders.put(pickle.dumps(order))

    def _start(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name=name, daemon=True).start()

    def _write(self, pipe: Connection) -> None:
        """Write queued commands to the pipe until the queue ends."""
        with pipe:
            while (content := self._orders.get()) is not None:
                with contextlib.suppress(OSError):  # it has ended, which `_listen` notices as well
                    pipe.send_bytes(content)

    def _receive(self) -> Any:
        """Return the next message that is not a heartbeat; raise `EOFError` at the end."""
        while True:
            kind, *content = pickle.loads(self._news.recv_bytes())
            self._num_messages += 1
            if kind != "beat":
                return kind, *content
            (self.stall,) = content

    def _receive_front(self) -> Any:
        """Return the arguments of `EngineFront`, or raise the error of loading the engine.

        Raises `EngineDeadError` if the process ends without one, for example because it is killed.
        """
        try:
            kind, content = self._receive()
        except EOFError:
            status = self._process.wait()
            died = EngineDeadError(f"the engine's process has ended with status {status}")
            raise self.error or died from None
        if kind == "failed":
            raise content
        return pickle.loads(content)

    def _watch(self) -> None:
        """Kill the process if it sends no heartbeat; `_listen` then finds the end of its pipe.

        A process that uses CPU time without sending heartbeats, for example in compiled code
        that holds the GIL, is not killed, but is considered hung after a while.
        """
        pulse, num_messages, silence = Pulse(self._process.pid), 0, 0.0
        looked = time.monotonic()
        while not self._is_over.wait(BEAT):
            now = time.monotonic()
            elapsed, looked = now - looked, now
            is_alive, num_messages = num_messages != self._num_messages, self._num_messages
            pulse.look(elapsed, is_alive)
            silence = 0.0 if is_alive else silence + min(elapsed, 2 * BEAT)
            if num_messages and silence >= WORK_LIMIT:
                self.stall = f"the engine process has sent no heartbeat for {silence:.0f} seconds"
            # Silence is noticed up to two heartbeats late, so subtract these to keep the timeout.
            if pulse.silence >= (self._timeout - 2 * BEAT if num_messages else _IMPORT_TIMEOUT):
                self.error = RuntimeError(
                    f"the engine process {pulse.pid} has sent no heartbeat for "
                    f"{pulse.silence:.0f} seconds and was killed"
                )
                self._process.kill()
                return

    def _listen(self) -> None:
        """Pass on the messages of the process until its pipe ends."""
        try:
            while True:
                kind, *content = self._receive()
                if kind == "news":
                    tokens, outputs, self._backlog, self._num_received = content
                    self._post(News([NewTokens(*new) for new in tokens], outputs))
                elif kind == "result":
                    number, value, error = content
                    self._calls.pop(number)(value, error)
                else:
                    (self.error,) = content
        except (EOFError, OSError):
            pass  # it has ended
        except Exception as error:  # for example a result that cannot be unpickled
            self.error = error
        finally:
            self._is_over.set()
            self._orders.put(None)  # closes the pipe; the process waits for that before it exits
            status = self._wait(1.0)  # the status of a killed process is available at once
            if status and self.error is None:
                self.error = RuntimeError(f"the engine's process has ended with status {status}")
            self.is_running = False
            self._post(None)
            if status is None and self._wait(_END_TIMEOUT) is None:
                self._process.kill()
                self._process.wait()


class _Sender:
    """An output queue of the engine process, with the thread that sends it.

    The engine's thread never waits for a full pipe. Until a message is sent, further tokens of a
    sequence are merged with its queued tokens.
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
        """Run an engine in a new thread, and send its updates from now on."""
        self._engine_thread = EngineThread(llm, self.post)
        return self._engine_thread

    def count_received(self, num_sequences: int) -> None:
        """Add to the number of received sequences that is reported to the parent process."""
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
                        new = new.after(earlier)
                    self._tokens[key] = new
                self._outputs += news.outputs
            self._lock.notify()

    def send(self, *message: Any) -> None:
        """Queue a message other than updates of requests."""
        with self._lock:
            self._others.append(message)
            self._lock.notify()

    def beat(self) -> None:
        """Queue a heartbeat, at most one at a time. Raises `OSError` after the end."""
        with self._lock:
            if self._is_over:
                raise OSError("nothing more is sent")
            self._is_beat_due = True
            self._lock.notify()

    def end(self) -> None:
        """Send the queued messages, and then close the pipe."""
        with self._lock:
            self._is_over = True
            self._lock.notify()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send_all()
        except OSError:
            pass  # the parent process has ended
        finally:
            self._pipe.close()  # also after an error, so that the parent does not wait forever

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
            for message in others:
                self._pipe.send_bytes(pickled(message))
            for some_tokens, some_outputs in _parts(tokens, outputs):
                load = self._engine_thread.backlog, self._num_received
                self._pipe.send_bytes(pickled(("news", some_tokens, some_outputs, *load)))


def _parts(tokens: list[Any], outputs: list[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Split updates into messages.

    An output with prompt log-probabilities consists of thousands of objects, and unpickling a
    message holds the receiver's interpreter lock (GIL) until it is complete.
    """
    large = [output for output in outputs if output.prompt_logprobs]
    small = [output for output in outputs if not output.prompt_logprobs]
    parts = [(tokens, small)] if tokens or small else []
    return parts + [([], [output]) for output in large]


def pickled(message: tuple[Any, ...]) -> bytes:
    """Pickle a message; replace errors that cannot be pickled by their text."""
    try:
        return pickle.dumps(message)
    except Exception:
        return pickle.dumps(tuple(map(_without_objects, message)))


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
    """Run the engine process: load the model, execute commands, exit."""
    # Terminals and supervisors signal all processes of a group; the parent handles the signals.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
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
        sender.send("failed", error)
        return
    gc.collect()
    gc.freeze()  # loaded objects stay alive; each full collection would scan them for 200 ms
    engine = llm.engine
    front = (engine.config, engine.model_config, engine.tokenizer)
    sender.send("ready", pickle.dumps((*front, engine.input_processor.max_model_len)))
    thread = sender.start_engine(llm)
    timeout = None
    try:
        _execute(orders, thread, sender)
    except EOFError:
        timeout = _ORPHAN_TIMEOUT  # the parent process has ended
    finally:
        thread.stop()
        if not thread.join(timeout):
            os._exit(1)  # the only way to end a step that hangs


def _execute(orders: Connection, thread: EngineThread, sender: _Sender) -> None:
    while True:
        name, *arguments = pickle.loads(orders.recv_bytes())
        if name == "add":
            sender.count_received(len(arguments[0].sequences))
            thread.add(*arguments)
        elif name == "abort":
            thread.abort(*arguments)
        elif name == "pause":
            thread.pause(*arguments)
        elif name in ("call", "call_llm"):
            number, function = arguments
            call = thread.call if name == "call" else thread.call_llm
            call(partial(_call, function), partial(sender.send, "result", number))
        else:
            return


def _call(function: bytes, engine: "GuardedEngine | LLM") -> Any:
    """Unpickle and call a function of the engine or of its `LLM`.

    Unpickling happens here, so that its errors are reported like any other error of the call.
    """
    return pickle.loads(function)(engine)


if __name__ == "__main__":
    _main(*(Connection(int(number)) for number in sys.argv[1:]))
