"""Your own engine. Each stage completes a part of it; at the end it serves `tiny-qwen3`.

The docstrings specify each stage; the course's page "Your own engine" has hints. Test a stage with
`pytest -x docs/your-engine/test_stage_1.py`, and so on. Replace the `raise` lines with code, and
add functions and attributes as you like: tests use only what is here. Do not change code that is
marked as given.

Shapes: n is the number of tokens of a step, over all its sequences. All numbers are float32. There
is no batch dimension.
"""

# ruff: noqa: F401  (the imports of the whole solution, so that you can copy from it)
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jinja2 import Template
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

# -- Stage 1: the model (chapter 2) --------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension of `x`."""
    raise NotImplementedError("stage 1")


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of [n, num_heads, head_dim]; `positions` are integers [n].

    In each head, dimensions i and i + head_dim / 2 are the coordinates of a point. Rotate it by the
    angle positions[token] x theta^(-2i / head_dim).
    """
    raise NotImplementedError("stage 1")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence: [n, num_heads, head_dim].

    q is [n, num_heads, head_dim]; k and v are [length, num_kv_heads, head_dim], with length >= n.
    The queries are those of the *last* n of `length` tokens; each sees itself and all before it.
    Query head h reads KV head h // (num_heads // num_kv_heads). Scores are divided by the square
    root of head_dim.
    """
    raise NotImplementedError("stage 1")


def read_json(file: Path) -> dict[str, Any]:
    """Given."""
    return json.loads(file.read_text(encoding="utf-8"))


class Model:
    """Qwen3, from a folder with `config.json` and `model.safetensors`."""

    def __init__(self, folder: Path) -> None:
        """Load the weights, in float32 (`safetensors.torch.load_file` gives a dictionary).

        `self.config` is the content of `config.json`. Print the names and shapes of the tensors
        first: apart from the embedding and the last norm they are the same for each layer.
        """
        raise NotImplementedError("stage 1")

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        """Hidden states [n, hidden_size], after the last norm; both inputs are integers [n].

        A layer: x = input_layernorm(hidden); q, k, v = projections of x, split into heads; q_norm
        and k_norm over each head of q and k, which are then rotated (`rope_parameters` of the
        config has theta); hidden += o_proj(attend(layer, q, k, v)). Then, with x =
        post_attention_layernorm(hidden): hidden += down_proj(silu(gate_proj(x)) * up_proj(x)).

        `attend(layer, q, k, v)` returns the output of the attention, [n, num_heads, head_dim]. The
        caller of `forward` provides it: only this changes from stage to stage.
        """
        raise NotImplementedError("stage 1")

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., vocab_size]; its weights are those of the embedding."""
        raise NotImplementedError("stage 1")


def generate(model: Model, prompt: list[int], num_new: int, cache: Any = None) -> list[int]:
    """The `num_new` most likely tokens, one after the other; `prompt` stays as it is.

    Stage 1: without a cache, each token needs a forward pass over all tokens before it.
    Stage 2: with a `Cache`, the first pass computes the whole prompt and each further one a single
    token, at its position.
    """
    raise NotImplementedError("stage 1")


# -- Stage 2: a KV cache for one sequence (chapter 3) --------------------------------------------


class Cache:
    """K and V of every layer, of one sequence."""

    def __init__(self) -> None:
        raise NotImplementedError("stage 2")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k and v of the new tokens to those of `layer`, then attend over all of them."""
        raise NotImplementedError("stage 2")


# -- Stage 3: a pool of blocks (chapter 4) -------------------------------------------------------


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Number of blocks for `num_tokens` tokens; the last one may be partly empty."""
    raise NotImplementedError("stage 3")


class Pool:
    """K and V of every layer, of all sequences: blocks 1 to num_blocks; block 0 is not used."""

    def __init__(self, model: Model, num_blocks: int, block_size: int) -> None:
        """`model.config` has the number of layers, `num_key_value_heads` and `head_dim`."""
        raise NotImplementedError("stage 3")

    def slots(self, table: list[int], positions: Tensor) -> Tensor:
        """The KV slot of each position, block x block_size + offset: integers [n] -> integers [n].

        `table` has the blocks of a sequence in order.
        """
        raise NotImplementedError("stage 3")

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v, [n, num_kv_heads, head_dim] each, to the KV slots `slots` of `layer`."""
        raise NotImplementedError("stage 3")

    def gather(self, layer: int, table: list[int], length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` tokens of a sequence: [length, num_kv_heads, head_dim]."""
        raise NotImplementedError("stage 3")


# -- Given: the data structures of the following stages ------------------------------------------


@dataclass
class Config:
    num_blocks: int = 256
    block_size: int = 16
    max_num_seqs: int = 16
    budget: int = 256  # tokens of a step
    threshold: int = 0  # most tokens of a step for one sequence; 0 is no limit


@dataclass(eq=False)
class Sequence:
    token_ids: list[int]  # the prompt, then the output
    num_prompt: int = 0
    max_len: int = 2048  # tokens, the prompt included
    eos: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    seed: int = 0
    stop: tuple[str, ...] = ()
    num_computed: int = 0  # tokens whose K and V are in the pool
    block_table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list, repr=False)  # of its full blocks
    num_cached: int = 0  # full blocks that are in the prefix cache
    # Stage 9: called after each appended token; whether the text contains a stop string.
    is_stopped: Callable[["Sequence"], bool] = lambda seq: False
    finish_reason: str | None = None
    text: str = ""  # the part that has been returned
    arrival: int = 0  # stage 11: its number, in the order of `add`


class Row(NamedTuple):
    seq: Sequence
    start: int  # tokens that are computed already
    n: int  # tokens of this step
    catches_up: bool  # whether it computes the last known token, so that one is sampled


@dataclass
class Plan:
    budget: int  # tokens that may still be added
    rows: list[Row] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, n: int) -> None:
        is_last = seq.num_computed + n == len(seq.token_ids)
        self.rows.append(Row(seq, seq.num_computed, n, is_last))
        self.budget -= n


# -- Stage 4: the block manager and the prefix cache (chapter 5) ---------------------------------


def chain_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of a block's tokens *and* of all before them, of which `parent` is the hash.

    Use a collision-resistant one from `hashlib`. The parent of a first block is b"".
    """
    raise NotImplementedError("stage 4")


class BlockManager:
    """Blocks 1 to num_blocks, all free at first, and a free queue in that order.

    A full block is *cached* under its chain hash when it is computed. A block that is freed keeps
    its content and its hash until it is taken for other content.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        raise NotImplementedError("stage 4")

    def lookup(self, seq: Sequence) -> list[int]:
        """The cached blocks of the longest prefix of `seq`.

        Never the last token: it must be computed. Changes only `seq.hashes`.
        """
        raise NotImplementedError("stage 4")

    def allocate(self, seq: Sequence, num_tokens: int, hits: Collection[int] = ()) -> bool:
        """Extend `seq.block_table` for `num_tokens` tokens; False, and no change, if impossible.

        `hits`, from `lookup`, come first in a table that is still empty, and count as cached. New
        blocks come from the front of the free queue, and lose their hash when they are taken. A
        table with enough blocks stays as it is.
        """
        raise NotImplementedError("stage 4")

    def cache(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the blocks that the first `num_tokens` tokens fill, unless they are cached already.

        If another block has the same hash, both are cached, and `lookup` finds the older one.
        """
        raise NotImplementedError("stage 4")

    def free(self, seq: Sequence) -> None:
        """Free all blocks of `seq`, the last one first.

        Afterwards its table is empty and `num_cached` is 0, so that it can be admitted again.

        A block is free when it is in no table. If it is the only one with its hash, it goes to the
        end of the free queue. Otherwise it is a copy: it loses its hash at once, since nothing is
        lost with it, and goes to the front.
        """
        raise NotImplementedError("stage 4")


# -- Stages 5 and 6: the scheduler (chapters 6 and 7) --------------------------------------------


class Scheduler:
    """`waiting` in order of arrival, `running` in order of admission, and `blocks`."""

    waiting: deque[Sequence]
    running: list[Sequence]
    blocks: BlockManager

    def __init__(self, config: Config) -> None:
        raise NotImplementedError("stage 5")

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        raise NotImplementedError("stage 5")

    def schedule(self) -> Plan:
        """Plan the next step.

        1. Each running sequence, in order, gets its `share`, if that is not 0 and `make_room`
           returns True.
        2. The blocks that these rows fill are cached.
        3. If no sequence was preempted, waiting sequences are admitted from the head, while fewer
           than `max_num_seqs` run and there is budget. For each, look up its prefix and allocate
           blocks for *all* its tokens; if that fails, no sequence behind it is admitted either. The
           tokens of the hits are computed. It gets its share, and the blocks which that fills are
           cached at once.
        4. Rows of one token come first; apart from that, the order stays.
        """
        raise NotImplementedError("stage 5")

    def update(self, plan: Plan, token_ids: list[int]) -> None:
        """Process the results of a step: one token for each row that catches up, in their order.

        Update `num_computed`. A token of `seq.eos` ends a sequence ("stop") and is not appended;
        any other is appended, and ends the sequence if `seq.is_stopped(seq)` ("stop") or if it has
        `max_len` tokens then ("length"; "stop" if both hold).
        """
        raise NotImplementedError("stage 5")

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a waiting or running sequence: remove it from its queue and free its blocks.

        If it has ended already, only replace the reason.
        """
        raise NotImplementedError("stage 5")

    def share(self, seq: Sequence, budget: int) -> int:
        """The tokens that `seq` gets: all that are not computed yet, but at most `budget`.

        Stage 6: and at most the configuration's threshold, if that is not 0.
        """
        raise NotImplementedError("stage 5")

    def make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        """Allocate blocks for `n` more tokens of a running sequence.

        Stage 5: the given code is enough, in a pool that is large enough.
        Stage 6: while there are too few blocks, preempt the last of `running`: its blocks and
        computed tokens are lost, it goes back to the head of `waiting`, and is added to
        `plan.preempted`. False if that was `seq` itself.
        """
        if self.blocks.allocate(seq, seq.num_computed + n):
            return True
        raise NotImplementedError("stage 6")


# -- Stage 7: a step as one packed batch (chapter 8) ---------------------------------------------


class Batch:
    """The tokens of all rows, one row after the other, without padding.

    input_ids     [n]  the new tokens of each row
    positions     [n]  the position of each in its sequence
    slot_mapping  [n]  the KV slot of its K and V
    cu_seqlens    a list: where each row's tokens begin, and where the last row's end
    output_rows   a list: the indices of tokens with logits, the last one of rows that catch up
    """

    def __init__(self, rows: list[Row], pool: Pool) -> None:
        raise NotImplementedError("stage 7")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v of all tokens, then attend row by row, each over its own blocks."""
        raise NotImplementedError("stage 7")


def run(model: Model, pool: Pool, rows: list[Row]) -> Tensor:
    """The logits of the rows that catch up, [number of these, vocab_size], in their order."""
    raise NotImplementedError("stage 7")


# -- Stage 8: sampling (chapter 11) --------------------------------------------------------------


def kept(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Which tokens may be sampled, bool [vocab_size]: the temperature has been applied.

    First the `top_k` most likely (0 is off); of these, the smallest set of most likely ones whose
    probability reaches `top_p` (1 is off). The token that crosses the threshold is kept, and equal
    logits are treated alike.
    """
    raise NotImplementedError("stage 8")


def log_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """log E for every token, E from Exp(1): a pure function of its arguments, without any state.

    `seed` is below 2^64. The method is up to you. With that of
    `nanoserve/sampling/gumbel_noise.py` (and 0 as the completion) stage 10 finds equal tokens for
    sampled requests too; this is optional.
    """
    raise NotImplementedError("stage 8")


def draw(logits: Tensor, seq: Sequence) -> int:
    """The next token of `seq`, from its settings and logits [vocab_size], which are not changed.

    At temperature 0 the most likely one. Otherwise the one with the largest logits / temperature -
    noise among those that are kept, with the noise of its seed and of the position of the new
    token, which is len(seq.token_ids).
    """
    raise NotImplementedError("stage 8")


# -- Stage 9: the loop, and the text (chapters 12 and 13) ----------------------------------------


def until_stop(text: str, stops: tuple[str, ...], is_over: bool) -> tuple[str, str | None]:
    """The part of the text that may be returned, and the stop string that ends it, if any.

    The text ends before the stop string that begins first. Unless it `is_over`, an end that may be
    the beginning of a stop string is held back.
    """
    raise NotImplementedError("stage 9")


class Engine:
    """Accepts requests at any time and advances all of them step by step.

    `scheduler` and `max_len` may be read. `max_len` is the longest sequence that the model supports
    (`max_position_embeddings`) and the pool can hold.
    """

    scheduler: Scheduler
    max_len: int

    def __init__(self, folder: Path, config: Config) -> None:
        """The folder also has `tokenizer.json` (`tokenizers.Tokenizer.from_file`), the chat
        template in `tokenizer_config.json` (`jinja2.Template`), and the EOS tokens in
        `generation_config.json`.
        """
        raise NotImplementedError("stage 9")

    def add(self, prompt: str | list[int], max_tokens: int = 100, **sampling: Any) -> Sequence:
        """Queue a request. `sampling` are fields of `Sequence`, such as temperature and stop; set
        `num_prompt`, `max_len` (prompt and `max_tokens`, at most the engine's) and `eos` yourself.

        ValueError, and nothing is queued, for an empty prompt, or one so long that not even one
        more token fits.
        """
        raise NotImplementedError("stage 9")

    def step(self) -> dict[Sequence, str]:
        """Run one step. Return the new text of each sequence that got a token.

        {} if there was nothing to do. The pieces of a sequence together are its text: no piece ends
        with half a character or with what may become a stop string, unless it is the last. A stop
        string ends a sequence ("stop"), even if it has just reached its maximum length.
        """
        raise NotImplementedError("stage 9")

    def abort(self, seq: Sequence) -> None:
        """End a sequence ("abort") and free its blocks, unless it has ended already."""
        raise NotImplementedError("stage 9")

    def chat(self, question: str, max_tokens: int = 100, **sampling: Any) -> Iterator[str]:
        """The answer to `question`, as a user's message in the chat template, piece by piece.

        The template needs `messages=[{"role": ..., "content": ...}]`, with the role "user", and
        `add_generation_prompt=True`. If the caller closes this generator before its end, the
        request is aborted.
        """
        raise NotImplementedError("stage 9")
