"""Exercise: the admission of a pool that only decodes, and to which K and V are sent.

A request's prompt is computed elsewhere, with its first output token. Then its K and V are sent to
this pool, and it decodes. Complete `DecodeSide`, which decides when transfers start and which
requests are admitted. It counts blocks and moves none. A sequence of `num_tokens` (prompt and
first token) has (num_tokens - 1) // block_size *full* blocks of its prompt, and only these are
sent. To be admitted it needs the blocks for num_tokens: these, and exactly one more. No sequence
here grows beyond its last block. The rules:

1. `computed`: the prompt is computed. The request joins the end of the line.
2. `start_transfers`: from the head of the line, requests get their full blocks here, and their
   transfer starts. Stop at the first request that does not fit: no request overtakes the head. A
   request fits if all the blocks that it needs are free *in addition to the reserved ones*. These
   are one block for each request whose transfer is in flight or has arrived, which it will need
   besides its full ones; all the blocks that it needs for each request whose transfer failed; and
   none for admitted requests.
3. `arrived`: the K and V of a request have arrived. It is queued, and keeps its blocks.
4. `failed`: the transfer of a request failed. Its blocks are free again, and it is queued: its
   tokens are known, so it computes its prompt here.
5. `admit`: admit requests from the queue, in the order in which their prompts were computed (not in
   which K and V arrived), while fewer than `max_num_seqs` run and there are enough blocks. Again,
   no request overtakes the head. Return, by name, how many tokens each computes in its first step.
6. `finished`: a running request has ended, and frees its blocks.

Test it with `pytest -x docs/25-disaggregation/test_exercise.py`.
"""


class DecodeSide:
    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        raise NotImplementedError

    def computed(self, name: str, num_tokens: int) -> None:
        raise NotImplementedError

    def start_transfers(self) -> list[str]:
        """Names of the requests whose transfer starts now, in the order of the line."""
        raise NotImplementedError

    def arrived(self, name: str) -> None:
        raise NotImplementedError

    def failed(self, name: str) -> None:
        raise NotImplementedError

    def admit(self) -> dict[str, int]:
        raise NotImplementedError

    def finished(self, name: str) -> None:
        raise NotImplementedError
