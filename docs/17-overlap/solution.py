"""A solution of `exercise.py`."""

from collections import deque
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class _Running:
    request: Request
    slot: int
    output: list[int] = field(default_factory=list)
    has_started: bool = False
    num_pending: int = 0
    has_ended: bool = False

    def row(self) -> Row:
        prompt = self.request.prompt
        if not self.has_started:
            return Row(self.slot, 0, prompt)
        known = len(prompt) + len(self.output)
        last = PENDING if self.num_pending else self.output[-1]
        return Row(self.slot, known + self.num_pending - 1, [last])


def generate(requests: list[Request], device: Device) -> dict[str, list[int]]:
    waiting, free = deque(requests), list(range(device.num_slots))
    running: list[_Running] = []
    in_flight: deque[list[_Running]] = deque()
    outputs: dict[str, list[int]] = {}
    while waiting or running:
        while waiting and free:
            running.append(_Running(waiting.popleft(), free.pop()))
        planned = [r for r in running if len(r.output) + r.num_pending < r.request.max_tokens]
        if planned:
            device.launch([r.row() for r in planned])
            in_flight.append(planned)
        if len(in_flight) == 2 or not planned:
            for r, token in zip(in_flight.popleft(), device.collect(), strict=True):
                if not r.has_ended:
                    _take(r, token)
                    if r.has_ended:
                        running.remove(r)
                        free.append(r.slot)
                        outputs[r.request.name] = r.output
        # The step that was launched counts from here on.
        for r in planned:
            r.has_started, r.num_pending = True, 1
    return outputs


def _take(r: _Running, token: int) -> None:
    r.num_pending = 0
    if token != EOS:
        r.output.append(token)
    r.has_ended = token == EOS or len(r.output) == r.request.max_tokens
