"""A solution of `your_engine.py`: a small inference engine in one file, stage by stage."""

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

# -- Stage 1: the model --------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    frequencies = 1 / theta ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    angles = (positions[:, None] * frequencies)[:, None]  # [n, 1, size / 2]: the same for all heads
    (first, second), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    unseen = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


class Model:
    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        loaded = load_file(folder / "model.safetensors").items()
        self.weights = {name.removesuffix(".weight"): x.float() for name, x in loaded}
        starts = [f"model.layers.{i}." for i in range(self.config["num_hidden_layers"])]
        all_of = self.weights.items()
        self.layers = [{n[len(p) :]: x for n, x in all_of if n.startswith(p)} for p in starts]

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        eps, theta = self.config["rms_norm_eps"], self.config["rope_parameters"]["rope_theta"]
        hidden = self.weights["model.embed_tokens"][token_ids]
        for layer, w in enumerate(self.layers):
            x = rms_norm(hidden, w["input_layernorm"], eps)
            heads = [F.linear(x, w[f"self_attn.{name}_proj"]) for name in "qkv"]
            q, k, v = (head.unflatten(1, (-1, self.config["head_dim"])) for head in heads)
            q = rotate(rms_norm(q, w["self_attn.q_norm"], eps), positions, theta)
            k = rotate(rms_norm(k, w["self_attn.k_norm"], eps), positions, theta)
            hidden = hidden + F.linear(attend(layer, q, k, v).flatten(1), w["self_attn.o_proj"])
            x = rms_norm(hidden, w["post_attention_layernorm"], eps)
            x = F.silu(F.linear(x, w["mlp.gate_proj"])) * F.linear(x, w["mlp.up_proj"])
            hidden = hidden + F.linear(x, w["mlp.down_proj"])
        return rms_norm(hidden, self.weights["model.norm"], eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weights["model.embed_tokens"])


def generate(model: Model, prompt: list[int], num_new: int, cache: Any = None) -> list[int]:
    tokens, computed = list(prompt), 0
    for _ in range(num_new):
        positions = torch.arange(computed, len(tokens))
        attend = cache.attend if cache else lambda _, q, k, v: attention(q, k, v)
        hidden = model.forward(torch.tensor(tokens[computed:]), positions, attend)
        computed = len(tokens) if cache else 0
        tokens.append(int(model.logits(hidden[-1]).argmax()))
    return tokens[len(prompt) :]


# -- Stage 2: a KV cache for one sequence --------------------------------------------------------


class Cache:
    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kv:
            k, v = map(torch.cat, zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = k, v
        return attention(q, k, v)


# -- Stage 3: a pool of blocks -------------------------------------------------------------------


class Pool:
    def __init__(self, model: Model, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        heads, dim = model.config["num_key_value_heads"], model.config["head_dim"]
        # Block 0 is not used.
        self.kv = torch.zeros(len(model.layers), 2, num_blocks + 1, block_size, heads, dim)

    def slots(self, table: list[int], positions: Tensor) -> Tensor:
        blocks = torch.tensor(table)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.kv[layer].flatten(1, 2)[:, slots] = torch.stack([k, v])

    def gather(self, layer: int, table: list[int], length: int) -> tuple[Tensor, Tensor]:
        blocks = table[: blocks_needed(length, self.block_size)]
        return self.kv[layer][:, blocks].flatten(1, 2)[:, :length].unbind()


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


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


# -- Stage 4: the block manager and the prefix cache ---------------------------------------------


def chain_hash(parent: bytes, token_ids: list[int]) -> bytes:
    return sha256(parent + np.array(token_ids, dtype=np.int32).tobytes()).digest()


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref_counts = [0] * (num_blocks + 1)
        self.free_queue = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.blocks_of: dict[bytes, list[int]] = {}  # the cached blocks: one, and its copies
        self.hash_of: dict[int, bytes] = {}

    def lookup(self, seq: Sequence) -> list[int]:
        hashes = self._hashes(seq, (len(seq.token_ids) - 1) // self.block_size)
        return [self.blocks_of[each][0] for each in takewhile(self.blocks_of.__contains__, hashes)]

    def allocate(self, seq: Sequence, num_tokens: int, hits: Collection[int] = ()) -> bool:
        revived = [block for block in hits if self.ref_counts[block] == 0]
        num_new = blocks_needed(num_tokens, self.block_size) - len(seq.block_table) - len(hits)
        if num_new + len(revived) > len(self.free_queue):
            return False
        for block in revived:
            del self.free_queue[block]
        new = [self.free_queue.popitem(last=False)[0] for _ in range(num_new)]
        for block in new:
            self._evict(block)  # it will hold other content
        for block in [*hits, *new]:
            self.ref_counts[block] += 1
            seq.block_table.append(block)
        seq.num_cached += len(hits)
        return True

    def cache(self, seq: Sequence, num_tokens: int) -> None:
        hashes = self._hashes(seq, num_tokens // self.block_size)
        for i in range(seq.num_cached, len(hashes)):
            self.blocks_of.setdefault(hashes[i], []).append(seq.block_table[i])
            self.hash_of[seq.block_table[i]] = hashes[i]
        seq.num_cached = max(seq.num_cached, len(hashes))

    def free(self, seq: Sequence) -> None:
        while seq.block_table:
            block = seq.block_table.pop()
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None
                if self.blocks_of.get(self.hash_of.get(block)) != [block]:
                    self._evict(block)  # if it is a copy
                    self.free_queue.move_to_end(block, last=False)
        seq.num_cached = 0

    def _evict(self, block: int) -> None:
        if block in self.hash_of:
            block_hash = self.hash_of.pop(block)
            self.blocks_of[block_hash].remove(block)
            if not self.blocks_of[block_hash]:
                del self.blocks_of[block_hash]

    def _hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        for i in range(len(seq.hashes), num_blocks):
            tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            seq.hashes.append(chain_hash(seq.hashes[-1] if seq.hashes else b"", tokens))
        return seq.hashes[:num_blocks]


# -- Stages 5 and 6: the scheduler ---------------------------------------------------------------


class Scheduler:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> Plan:
        plan = Plan(self.config.budget)
        for seq in list(self.running):
            n = self.share(seq, plan.budget)
            if n and seq in self.running and self.make_room(seq, n, plan):
                plan.add(seq, n)
        for seq, start, n, _ in plan.rows:
            self.blocks.cache(seq, start + n)
        if not plan.preempted:
            self._admit(plan)
        plan.rows.sort(key=lambda row: row.n > 1)
        return plan

    def _admit(self, plan: Plan) -> None:
        while self.waiting and plan.budget and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            hits = self.blocks.lookup(seq)
            if not self.blocks.allocate(seq, len(seq.token_ids), hits):
                break  # no sequence overtakes the head
            self.running.append(self.waiting.popleft())
            seq.num_computed = len(hits) * self.config.block_size
            plan.add(seq, self.share(seq, plan.budget))
            self.blocks.cache(seq, seq.num_computed + plan.rows[-1].n)

    def update(self, plan: Plan, token_ids: list[int]) -> None:
        sampled = [row.seq for row in plan.rows if row.catches_up]
        for seq, _, n, _ in plan.rows:
            seq.num_computed += n
        for seq, token_id in zip(sampled, token_ids, strict=True):
            if token_id not in seq.eos:
                seq.token_ids.append(token_id)
            is_stopped = token_id in seq.eos or seq.is_stopped(seq)
            if is_stopped or len(seq.token_ids) >= seq.max_len:
                self.finish(seq, "stop" if is_stopped else "length")

    def finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        queue = self.running if seq in self.running else self.waiting
        if seq in queue:
            queue.remove(seq)
        self.blocks.free(seq)

    def share(self, seq: Sequence, budget: int) -> int:
        return min(len(seq.token_ids) - seq.num_computed, budget, self.config.threshold or budget)

    def make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        while not self.blocks.allocate(seq, seq.num_computed + n):
            victim = self.running.pop()  # the last to arrive
            self.blocks.free(victim)
            victim.num_computed = 0
            self.waiting.appendleft(victim)
            plan.preempted.append(victim)
            if victim is seq:
                return False
        return True


# -- Stage 7: a step as one packed batch ---------------------------------------------------------


class Batch:
    def __init__(self, rows: list[Row], pool: Pool) -> None:
        self.rows, self.pool = rows, pool
        spans = [torch.arange(row.start, row.start + row.n) for row in rows]
        slots = [pool.slots(row.seq.block_table, at) for row, at in zip(rows, spans, strict=True)]
        tokens = [torch.tensor(row.seq.token_ids)[at] for row, at in zip(rows, spans, strict=True)]
        self.input_ids, self.positions, self.slot_mapping = map(torch.cat, (tokens, spans, slots))
        self.cu_seqlens = [0, *accumulate(row.n for row in rows)]
        ends = zip(rows, self.cu_seqlens[1:], strict=True)
        self.output_rows = [end - 1 for row, end in ends if row.catches_up]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.slot_mapping, k, v)
        parts = []
        for (seq, start, n, _), first in zip(self.rows, self.cu_seqlens, strict=False):
            context = self.pool.gather(layer, seq.block_table, start + n)
            parts.append(attention(q[first : first + n], *context))
        return torch.cat(parts)


def run(model: Model, pool: Pool, rows: list[Row]) -> Tensor:
    batch = Batch(rows, pool)
    hidden = model.forward(batch.input_ids, batch.positions, batch.attend)
    return model.logits(hidden[batch.output_rows])


# -- Stage 8: sampling ---------------------------------------------------------------------------


def kept(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    kth = logits.topk(min(top_k or len(logits), len(logits))).values[-1]
    probs = logits.masked_fill(logits < kth, -torch.inf).softmax(-1)
    ordered = probs.sort(descending=True).values
    last = (ordered.cumsum(0) < top_p).sum().clamp(max=len(logits) - 1)
    border = ordered[last] if top_p < 1 else 0.0  # at 1, rounding could exclude some
    return (logits >= kth) & (probs >= border)


def scrambled(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def log_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    weyl, key = np.uint32(0x9E3779B9), np.zeros(1, dtype=np.uint32)
    for part in (seed & 0xFFFFFFFF, seed >> 32, position, 0):  # 0: the first completion
        key = scrambled((key ^ np.uint32(part)) + weyl)
    hashes = scrambled(np.arange(vocab_size, dtype=np.uint32) * weyl ^ key)
    uniform = (torch.from_numpy(hashes).float() + 0.5) * 2.0**-32
    return uniform.clamp(max=1 - 2.0**-24).neg().log1p().neg().log()


def draw(logits: Tensor, seq: Sequence) -> int:
    if seq.temperature > 0:
        logits = logits / seq.temperature
        logits = logits.masked_fill(~kept(logits, seq.top_k, seq.top_p), -torch.inf)
        logits = logits - log_noise(seq.seed, len(seq.token_ids), len(logits))
    return int(logits.argmax())


# -- Stage 9: the loop, and the text -------------------------------------------------------------


def until_stop(text: str, stops: tuple[str, ...], is_over: bool) -> tuple[str, str | None]:
    found = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
    if found:
        return text[: found[0]], found[1]
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text if is_over else text[: len(text) - max(begun, default=0)], None


class Engine:
    def __init__(self, folder: Path, config: Config) -> None:
        self.model = Model(folder)
        self.pool = Pool(self.model, config.num_blocks, config.block_size)
        self.scheduler = Scheduler(config)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = Template(read_json(folder / "tokenizer_config.json")["chat_template"])
        self.eos = frozenset(read_json(folder / "generation_config.json")["eos_token_id"])
        longest = self.model.config["max_position_embeddings"]
        self.max_len = min(longest, config.num_blocks * config.block_size)

    def add(self, prompt: str | list[int], max_tokens: int = 100, **sampling: Any) -> Sequence:
        tokens = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not 0 < len(tokens) < self.max_len:
            raise ValueError(f"a prompt has 1 to {self.max_len - 1} tokens, not {len(tokens)}")
        max_len = min(self.max_len, len(tokens) + max_tokens)
        seq = Sequence(tokens, len(tokens), max_len, self.eos, is_stopped=self._stops, **sampling)
        self.scheduler.add(seq)
        return seq

    def step(self) -> dict[Sequence, str]:
        plan = self.scheduler.schedule()
        if not plan.rows:
            return {}
        sampled = [row.seq for row in plan.rows if row.catches_up]
        logits = run(self.model, self.pool, plan.rows)
        tokens = [draw(row, seq) for row, seq in zip(logits, sampled, strict=True)]
        self.scheduler.update(plan, tokens)
        return {seq: self._show(seq) for seq in sampled}

    def abort(self, seq: Sequence) -> None:
        if not seq.finish_reason:
            self.scheduler.finish(seq, "abort")

    def _text(self, seq: Sequence) -> str:
        return self.tokenizer.decode(seq.token_ids[seq.num_prompt :])

    def _stops(self, seq: Sequence) -> bool:
        return any(stop in self._text(seq) for stop in seq.stop)

    def _show(self, seq: Sequence) -> str:
        # As long as more tokens come, the end may be half a character.
        shown = self._text(seq) if seq.finish_reason else self._text(seq).rstrip("\ufffd")
        visible, _ = until_stop(shown, seq.stop, bool(seq.finish_reason))
        piece, seq.text = visible[len(seq.text) :], visible
        return piece

    def chat(self, question: str, max_tokens: int = 100, **sampling: Any) -> Iterator[str]:
        messages = [{"role": "user", "content": question}]
        prompt = self.template.render(messages=messages, add_generation_prompt=True)
        seq = self.add(prompt, max_tokens, **sampling)
        try:
            while not seq.finish_reason:
                yield self.step().get(seq, "")
        finally:
            self.abort(seq)
