"""Exercise: an asynchronous loop that returns the tokens of a synchronous loop.

Complete `generate`. The device has `num_slots` slots. A slot stores the tokens that it was given,
by position, and the last token that it has sampled. The device has two methods:

- `device.launch(rows)` enqueues a step after those that are in flight, and does not wait. At most
  two steps may be in flight.
- `device.collect()` waits for the oldest step in flight, and returns a token for each of its rows.

A row consists of a slot, the position of its first token, and its tokens. If a token is not known
yet, because the step that samples it is still in flight, the row contains `PENDING`; the device
then uses the last token that it has sampled for the slot. The rules:

1. In each iteration: give free slots to waiting requests, in their order. Plan a row for each
   running request. Launch these rows, if there are any. Then collect the oldest step if two are in
   flight or if nothing was launched. So a step is collected while its successor is in flight.
2. A request's first row is its whole prompt, from position 0. After that it has a row with one
   token for each token that it gets.
3. A pending token counts: a request is not planned if its output, including the pending token, has
   `max_tokens` tokens.
4. `EOS` ends a request and is not part of its output. The token with which the output has
   `max_tokens` tokens ends it, too. Its slot is free at once.
5. By then the next step may have a row for it. Discard the token of that row, even if the slot has
   been given to another request in the meantime.

Return the output of each request, by name.

Test it with `pytest -x docs/17-overlap/test_exercise.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

EOS = 0
PENDING = -1


@dataclass
class Request:
    name: str
    prompt: list[int]
    max_tokens: int


class Row(NamedTuple):
    slot: int
    start: int
    token_ids: list[int]


class Device(Protocol):
    num_slots: int

    def launch(self, rows: list[Row]) -> None: ...

    def collect(self) -> list[int]: ...


def generate(requests: list[Request], device: Device) -> dict[str, list[int]]:
    raise NotImplementedError
