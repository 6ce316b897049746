"""Chapter 24's numbers: size of an adapter, many of them in one batch, keys, pooling, images.

Most is computed without the engine, so that each table is a few lines: the products are numpy, on a
batch that is packed as the engine packs one; its own `Scheduler` and `BlockManager` decide which
requests are admitted under a limit of adapters, and which share blocks. Then `served` runs the
engine with adapters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tables import table
from torch import Tensor

from nanoserve import LLM, LoRARequest
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

# LLaMA-3.1-8B: (inputs, outputs) of the matrices of a layer. Two bytes a number, H100.
MATRICES = {
    "q": (4096, 4096),
    "k": (4096, 1024),
    "v": (4096, 1024),
    "o": (4096, 4096),
    "gate": (4096, 14336),
    "up": (4096, 14336),
    "down": (14336, 4096),
}
NUM_LAYERS, PARAMETERS = 32, 8_030_261_248
BANDWIDTH = 3.35e12


# ---------------------------------------------------------------- the size of an adapter


def adapter_parameters(rank: int, matrices: str = " ".join(MATRICES)) -> int:
    """Of each matrix, A is [rank, inputs] and B is [outputs, rank]."""
    return NUM_LAYERS * sum(rank * sum(MATRICES[name]) for name in matrices.split())


def adapter_table(ranks: list[int]) -> str:
    rows = []
    for matrices in ("q v", " ".join(MATRICES)):
        for rank in ranks:
            count = adapter_parameters(rank, matrices)
            names = "all seven" if len(matrices) > 3 else matrices.replace(" ", ", ")
            share = f"{count / PARAMETERS:.2%}"
            rows.append((names, rank, f"{count:,}", f"{2 * count / 1e6:,.0f} MB", share))
    return table(("matrices", "rank", "parameters", "bytes", "of the model"), rows)


def fleet_gigabytes(num_models: int, rank: int, merged: bool) -> float:
    """Memory of this many fine-tuned models: whole models, or one model and their adapters."""
    adapters = num_models * 2 * adapter_parameters(rank)
    return (num_models * 2 * PARAMETERS if merged else 2 * PARAMETERS + adapters) / 1e9


def extra_share(rank: int) -> float:
    """Additional arithmetic of a token, as a fraction of that of the layers' matrices."""
    base = NUM_LAYERS * sum(a * b for a, b in MATRICES.values())
    return adapter_parameters(rank) / base


def step_table(rank: int, counts: list[int], rows: int) -> str:
    """Table: bytes that a decode step of `rows` sequences reads, by how many adapters they use."""
    lines = []
    for count in counts:
        once, each = (2 * adapter_parameters(rank) * n for n in (count, rows if count else 0))
        cells = []
        for adapters in (once, each):
            read = 2 * PARAMETERS + adapters
            cells += [f"{adapters / 1e9:.2f} GB", f"{read / BANDWIDTH * 1e3:.1f} ms"]
        lines.append((count, *cells))
    names = ("each once", "a step takes", "one for each row", "a step takes")
    return table(("adapters in the batch", *names), lines)


# ---------------------------------------------------------------- the product


@dataclass(frozen=True)
class Adapter:
    """y = W x + scaling B A x. A is [rank, inputs], B is [outputs, rank]."""

    a: np.ndarray
    b: np.ndarray
    scaling: float  # alpha / rank

    def merged(self, weight: np.ndarray) -> np.ndarray:
        return weight + self.scaling * self.b @ self.a


WEIGHT = np.array([[1, 0, 2], [0, 1, 1], [3, 0, 0], [1, 1, 1]])
SMALL = Adapter(a=np.array([[1, 0, -1]]), b=np.array([[1], [0], [2], [0]]), scaling=2)
X = np.array([1, 2, 3])


def small_table() -> str:
    """Table: one token through a matrix of 4 x 3 and an adapter of rank 1, both ways."""
    base, inner = WEIGHT @ X, SMALL.a @ X
    delta = SMALL.scaling * SMALL.b @ inner
    rows = [
        ("W x", base.tolist(), 12),
        ("A x", inner.tolist(), 3),
        ("scaling B (A x)", delta.tolist(), 4),
        ("sum", f"**{(base + delta).tolist()}**", ""),
        ("(W + scaling B A) x", f"**{(SMALL.merged(WEIGHT) @ X).tolist()}**", 12),
    ]
    return table(("what", "value", "products"), rows)


def segments(adapter_of: np.ndarray) -> tuple[np.ndarray, dict[int, slice]]:
    """Rows sorted by adapter, and the slice of each adapter's rows in that order; 0 is none."""
    order = np.argsort(adapter_of, kind="stable")
    ids, starts = np.unique(adapter_of[order], return_index=True)
    ends = [*starts[1:], len(order)]
    spans = {int(i): slice(int(a), int(b)) for i, a, b in zip(ids, starts, ends, strict=True)}
    return order, {i: span for i, span in spans.items() if i}


def batched(
    x: np.ndarray, weight: np.ndarray, adapters: dict[int, Adapter], adapter_of: np.ndarray
) -> np.ndarray:
    """All rows of a packed batch: one product with the weight, two small ones for each adapter."""
    y = x @ weight.T
    order, spans = segments(adapter_of)
    for number, span in spans.items():
        rows, adapter = order[span], adapters[number]
        y[rows] += adapter.scaling * (x[rows] @ adapter.a.T) @ adapter.b.T
    return y


def mixed_table() -> str:
    """Table: four rows of a batch through the small matrix, by `batched` and by merged weights."""
    other = Adapter(a=np.array([[0, 1, 0], [1, 1, 0]]), b=np.ones((4, 2), dtype=int), scaling=1)
    adapters, adapter_of = {1: SMALL, 2: other}, np.array([2, 0, 1, 2])
    x = np.array([[1, 0, 0], X, X, [0, 1, 1]])
    y = batched(x, WEIGHT, adapters, adapter_of)
    rows = []
    for i, number in enumerate(adapter_of.tolist()):
        own = adapters[number].merged(WEIGHT) if number else WEIGHT
        values = (each.tolist() for each in (x[i], WEIGHT @ x[i], y[i], own @ x[i]))
        rows.append((i, number or "none", *values))
    return table(("row", "adapter", "x", "W x", "in the batch", "with a merged weight"), rows)


def batch_table(rows: list[tuple[str, int, int]]) -> str:
    """Table: sequences of a packed batch as (name, tokens, adapter), and each adapter's rows."""
    names = [name for name, n, _ in rows for _ in range(n)]
    adapter_of = np.array([adapter for _, n, adapter in rows for _ in range(n)])
    order, spans = segments(adapter_of)
    numbers = np.flatnonzero(adapter_of == 0).tolist()
    lines = [("none", numbers, ", ".join(dict.fromkeys(names[i] for i in numbers)), "none")]
    for number, span in spans.items():
        found = order[span].tolist()
        sequences = ", ".join(dict.fromkeys(names[i] for i in found))
        lines.append((number, found, sequences, f"{len(found)} x in x r, {len(found)} x r x out"))
    return table(("adapter", "rows of the batch", "of", "small products"), lines)


# ---------------------------------------------------------------- the cache, the scheduler


def hits_table() -> str:
    """Table: how many of 64 equal tokens each request finds in the cache, one after the other."""
    manager = BlockManager(num_blocks=64, block_size=16, prefix_cache_seed=0)
    keys = [
        ("no adapter", ()),
        ("no adapter", ()),
        ("adapter of content 5c1e", ("adapter", "5c1e")),
        ("the same again", ("adapter", "5c1e")),
        ("a tenant whose salt is 5c1e", ("cache_salt", "5c1e")),
        ("this adapter and this salt", ("adapter", "5c1e", "cache_salt", "5c1e")),
    ]
    rows = []
    for request, key in keys:
        params = SamplingParams(max_tokens=1)
        seq = Sequence("", [*range(64), 7], params, 128, cache_key=key)
        hits = manager.lookup(seq)
        manager.allocate(seq, seq.num_tokens, hits)
        manager.cache(seq, seq.num_tokens)
        rows.append((request, f"`{key}`", 16 * len(hits)))
    return table(("request", "its key", "tokens found"), rows)


class AdapterLimit(Extension):
    """At most `max_loras` adapters in a step. A request beyond the limit waits: with `skips` alone,
    otherwise together with all requests behind it. A request's id is the name of its adapter."""

    def __init__(self, max_loras: int, skips: bool) -> None:
        self.max_loras, self.skips, self.is_closed = max_loras, skips, False
        self.scheduler: Scheduler | None = None

    def on_step_start(self) -> None:
        self.is_closed = False

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        present = {each.request_id for each in self.scheduler.running}
        fits = len(present | {seq.request_id}) <= self.max_loras
        self.is_closed = self.is_closed or not (fits or self.skips)
        return fits and not self.is_closed


def first_steps(
    adapters: str, lengths: list[int], max_loras: int, skips: bool, comes: list[int] | None = None
) -> list[int]:
    """The step in which each request begins. Prompts have one token, so n tokens take n steps.

    `AdapterLimit` limits the admission. `comes`: the step in which each arrives, by default the
    first one.
    """
    config = EngineConfig("none", enable_prefix_caching=False).for_device("cpu")
    limit = AdapterLimit(max_loras, skips)
    scheduler = limit.scheduler = Scheduler(config, 4096, 4096, extensions=[limit])
    requests = [
        Sequence(name, [1], SamplingParams(max_tokens=n), 4096, arrival=i)
        for i, (name, n) in enumerate(zip(adapters, lengths, strict=True))
    ]
    begun: dict[Sequence, int] = {}
    step = 0
    while len(begun) < len(requests):
        step += 1
        for seq in requests:
            if (comes or [1] * len(requests))[seq.arrival] == step:
                scheduler.add(seq)
        plan = scheduler.schedule()
        begun |= dict.fromkeys(plan.admitted, step)
        scheduler.commit(plan)
        scheduler.update(plan, [[7] for _ in plan.sampled])
    return [begun[seq] for seq in requests]


def limit_table(adapters: str, lengths: list[int], max_loras: int) -> str:
    waits, skips = (first_steps(adapters, lengths, max_loras, each) for each in (False, True))
    rows = [
        (i, f"{name}, {n} tokens", a, b)
        for i, (name, n, a, b) in enumerate(zip(adapters, lengths, waits, skips, strict=True), 1)
    ]
    header = ("request", "adapter, answer", "first step without overtaking", "with skipping")
    return table(header, rows)


def starving(num_later: int, skips: bool) -> int:
    """The step in which a request of Z begins that arrives in step 2. There are two places, and X
    and Y run. Later, every eight steps, another request of X and one of Y arrive; each takes ten
    steps."""
    later = [1 + 8 * (i // 2 + 1) for i in range(2 * num_later)]
    adapters, lengths = "XYZ" + "XY" * num_later, [10] * (3 + 2 * num_later)
    return first_steps(adapters, lengths, 2, skips, [1, 1, 2, *later])[2]


# ---------------------------------------------------------------- the engine

RANK, ALPHA = 4, 48  # so large that random numbers change the answers
# Of a batch: question and adapter of each request.
SERVED = (
    ("What is a KV cache?", "first"),
    ("What is a KV cache?", "none"),
    ("What is a KV cache?", "second"),
    ("What is a block table?", "first"),
)


class Served(NamedTuple):
    """What a request got in the batch, and the tokens of a model with merged weights, alone."""

    text: str
    token_ids: list[int]
    merged: list[int]


def write_adapter(folder: Path, seed: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write an adapter of random numbers for two matrices of each layer, as peft does.

    Returns the weights with it merged in: W + scaling B A.
    """
    rng, tensors, merged = torch.Generator().manual_seed(seed), {}, dict(weights)
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            outputs, inputs = weight.shape
            a = torch.randn(RANK, inputs, generator=rng) / inputs**0.5
            b = torch.randn(outputs, RANK, generator=rng) / outputs**0.5
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            merged[name] = weight + ALPHA / RANK * b @ a
    folder.mkdir()
    entries = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


@cache
def served() -> tuple[list[Served], list[int]]:
    """Serve `SERVED` in one batch, and each request alone by a model with merged weights.

    Returns both, and the rows of each step of the batch.
    """
    params = SamplingParams(temperature=0, max_tokens=10)
    files = load_file(bundled_checkpoint("tiny-qwen3") / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in files.items()}
    chats = [[{"role": "user", "content": question}] for question, _ in SERVED]
    models, adapters, num_rows = {"none": weights}, {}, []
    with TemporaryDirectory() as folder:
        for seed, name in enumerate(("first", "second"), start=2):
            path = Path(folder, name)
            models[name] = write_adapter(path, seed, weights)
            adapters[name] = LoRARequest(name, seed, str(path))
        with LLM("tiny-qwen3", dtype="float32", enable_lora=True, max_loras=2) as llm:
            own = [*adapters.values()]
            llm.generate(["a", "b"], params, use_tqdm=False, lora_request=own)  # reads them
            llm.engine.observers.append(lambda plan, *_: num_rows.append(len(plan.rows)))
            requests = [adapters.get(name) for _, name in SERVED]
            outputs = llm.chat(chats, params, use_tqdm=False, lora_request=requests)
    found = []
    with LLM("tiny-qwen3", dtype="float32") as llm:
        for output, chat, (_, name) in zip(outputs, chats, SERVED, strict=True):
            llm.update_weights(models[name])
            (alone,) = llm.chat(chat, params, use_tqdm=False)
            (one,), (other,) = output.outputs, alone.outputs
            found.append(Served(one.text, list(one.token_ids), list(other.token_ids)))
    return found, num_rows


def served_table() -> str:
    """Table: requests of one batch, what they got, and how many tokens the merged models share."""
    rows = []
    for (question, name), one in zip(SERVED, served()[0], strict=True):
        num_equal = sum(map(int.__eq__, one.token_ids, one.merged))
        rows.append((question, name, one.text, f"{num_equal} of {len(one.merged)}"))
    return table(("question", "adapter", "first tokens", "equal with merged weights"), rows)


# ---------------------------------------------------------------- other outputs, other inputs

HIDDEN = np.array([[3.0, 0.0], [0.0, 4.0], [4.0, 3.0]])  # of three tokens


def pooled(how: str) -> list[float]:
    """One vector for the three tokens, of length 1."""
    vector = {"first": HIDDEN[0], "mean": HIDDEN.mean(axis=0), "last": HIDDEN[-1]}[how]
    return [round(float(value), 3) for value in vector / np.linalg.norm(vector)]


def pooling_table() -> str:
    rows = [(how, pooled(how)) for how in ("first", "mean", "last")]
    return table(("pooling", "embedding"), rows)


class MeanPooler:
    """Pools hidden states that come in chunks, of several sequences in a step: one sum per slot."""

    def __init__(self, num_slots: int, hidden_size: int) -> None:
        self._sums = np.zeros((num_slots, hidden_size))
        self._counts = np.zeros(num_slots, dtype=np.int64)

    def add(self, hidden: np.ndarray, slots: np.ndarray) -> None:
        """hidden: [rows, hidden_size]; slots: the slot of each row's sequence."""
        np.add.at(self._sums, slots, hidden)
        np.add.at(self._counts, slots, 1)

    def take(self, slot: int) -> np.ndarray:
        vector = self._sums[slot] / self._counts[slot]
        self._sums[slot], self._counts[slot] = 0, 0
        return vector / np.linalg.norm(vector)


def mean_in_chunks(sizes: list[int]) -> list[float]:
    """The mean of the three tokens, computed in chunks of these sizes."""
    pooler, first = MeanPooler(num_slots=1, hidden_size=2), 0
    for n in sizes:
        pooler.add(HIDDEN[first : first + n], np.zeros(n, dtype=np.int64))
        first += n
    return [round(float(value), 3) for value in pooler.take(0)]


def rerank_tokens(num_documents: int, document_len: int, query_len: int) -> int:
    """Tokens that a cross-encoder computes for a query: each document together with the query."""
    return num_documents * (document_len + query_len)


def probability_of_yes(yes: float, no: float) -> float:
    """The probability of "yes", from two logits."""
    return float(1 / (1 + np.exp(no - yes)))


def image_tokens(width: int, height: int, pixels: int = 28) -> int:
    """Tokens of an image as in Qwen2-VL: one for each square of `pixels` x `pixels`."""
    return round(width / pixels) * round(height / pixels)
