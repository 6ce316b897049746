"""What a person at the terminal sees of `generate`."""

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
