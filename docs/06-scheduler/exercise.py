"""Exercise: continuous batching, in one function.

Complete `simulate`. It simulates the given requests step by step, and returns what each step
computes: a dictionary from a request's name to its number of tokens. Memory is unlimited and there
is no prefix cache, so only slots and tokens are scarce. The rules:

1. At the beginning of step 0, 1, 2, ... the requests with this `arrival_step` are appended to the
   waiting queue, in the order in which they are listed.
2. Running requests come first, in the order in which they were admitted. Then waiting requests are
   admitted from the head of the queue, while fewer than `max_num_seqs` run and tokens are left.
3. Each request gets enough tokens for its computed tokens to catch up with its known tokens, which
   are the prompt and the tokens generated so far. But it gets no more than the rest of `budget`,
   and no more than `threshold`, if that is not 0.
4. A request that has caught up gets one new token at the end of the step. When it has generated
   `output_len` tokens, it leaves at once. Its last token is never computed.
5. A step in which there is nothing to do is an empty dictionary. The simulation ends after the
   step in which the last request leaves.

Test it with `pytest -x docs/06-scheduler/test_exercise.py`.
"""

from dataclasses import dataclass


@dataclass
class Request:
    name: str
    prompt_len: int
    output_len: int
    arrival_step: int = 0


def simulate(
    requests: list[Request], max_num_seqs: int, budget: int, threshold: int = 0
) -> list[dict[str, int]]:
    raise NotImplementedError
