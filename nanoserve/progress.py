"""What a person at the terminal sees of `generate`, and how a Ctrl-C gets in."""

import signal
import threading
import time

from tqdm import tqdm

from nanoserve.outputs import RequestOutput


class Progress:
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


class InterruptBetweenSteps:
    """Holds a Ctrl-C back until the step that it falls into is over; a second one goes through.

    Inside a step, an exception could strike between two lines that belong together. Only Python's
    own handler is replaced, and only in the main thread, where signals arrive.
    """

    def __enter__(self) -> "InterruptBetweenSteps":
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
