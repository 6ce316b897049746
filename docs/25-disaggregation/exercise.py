"""Exercise: the admission of a pool that only decodes, and to which K and V are sent.

A request's prompt is computed elsewhere, with its first output token. Then its K and V come here,
and it decodes. Complete `DecodeSide`, which decides whose K and V are sent when, and who is
admitted. It counts blocks and moves none. A sequence of `num_tokens` (prompt and first token) has
(num_tokens - 1) // block_size *full* blocks of its prompt, and only these are sent. To be admitted
it needs as many blocks as hold num_tokens: these, and exactly one more. No sequence here grows out
of its last block. The rules:

1. `computed`: the prompt is computed. The request joins the line, at its end.
2. `start_transfers`: from the head of the line, requests get their full blocks here, and their
   transfer begins. The first one that does not fit ends it: nobody overtakes the head. One fits if
   all the blocks that it needs are free *beside those that are promised*: to each request whose
   transfer is under way or has arrived, the one more that it will need; to each that failed, all
   that it needs; but to none that is admitted already.
3. `arrived`: the K and V of a request have come. It is queued, and keeps its blocks.
4. `failed`: they will not come. Its blocks are free again, and it is queued: its tokens are known,
   so it computes its prompt here.
5. `admit`: those in the queue, in the order in which their prompts were computed (not in which K
   and V came), while fewer than `max_num_seqs` run and the blocks last. Again nobody overtakes the
   head. Return by name how many tokens each computes in its first step.
6. `finished`: one that runs has ended, and gives back its blocks.

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
        """Names of those whose K and V are sent from now on, in the order of the line."""
        raise NotImplementedError

    def arrived(self, name: str) -> None:
        raise NotImplementedError

    def failed(self, name: str) -> None:
        raise NotImplementedError

    def admit(self) -> dict[str, int]:
        raise NotImplementedError

    def finished(self, name: str) -> None:
        raise NotImplementedError
