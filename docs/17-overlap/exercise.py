"""Exercise: a loop one step ahead that gives the tokens of a loop in turn.

Complete `generate`. The device has `num_slots` slots. A slot remembers the tokens that it was
given, by position, and the token that it yielded last. What you have of it:

- `device.launch(rows)` puts a step behind those that are under way, and does not wait. At most two
  may be under way.
- `device.collect()` waits for the oldest step under way, and returns a token for each of its rows.

A row names a slot, the position of its first token, and its tokens. Where a token is not known
yet, because the step that yields it is still under way, the row says `PENDING`; the device takes
the one that the slot yielded last. The rules:

1. A turn: give free slots to requests that wait, in their order. Plan a row for each request that
   runs. Launch these rows, if there are any. Then collect the oldest step, if two are under way
   or nothing was launched. So a step is collected while the one behind it is under way.
2. A request's first row is its whole prompt, from position 0. Then it has a row with one token for
   each token that it gets.
3. A token that will come counts: a request is not planned when its output, pending token included,
   has `max_tokens` tokens.
4. `EOS` ends a request and is not part of its output. So does the token that makes `max_tokens`.
   Its slot is free from then on, at once.
5. By then the next step may have a row for it. Throw away what that row yields, also if the slot
   has been given to somebody else meanwhile.

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
