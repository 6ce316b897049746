"""Run llama.cpp through the low-level bindings of llama-cpp-python.

Its `Llama` class handles one sequence at a time. Batching follows llama-server: one token for each
running sequence, then prompt chunks until the batch is full. Decoding is greedy.

Options: n_ubatch, kv_unified, type_k, ... (fields of `llama_context_params`); and
quantization=q8_0, q4_0 or q4_k_m, for which the library's quantizer converts the weights.
"""

import ctypes
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from . import Engine, Tokens, total_lens
from .gguf_file import write_gguf

_BATCH_TOKENS = 2048
_MOST_SEQUENCES = 256  # the limit with which the library is compiled


@dataclass
class _Running:
    index: int
    prompt: list[int]
    output_len: int
    slot: int
    num_computed: int = 0
    output: list[int] = field(default_factory=list)


class LlamaCppEngine(Engine):
    is_online = True

    @staticmethod
    def prepare(spec: Namespace) -> None:
        plain = _plain(spec)
        _make(plain, lambda file: write_gguf(Path(spec.model), file))
        _make(_file(spec), lambda file: _quantize(plain, file, spec.options["quantization"]))

    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        if spec.temperature:
            raise ValueError("llama.cpp is measured with greedy decoding only")
        lib.llama_backend_init()
        self._log = lib.llama_log_callback(_print_nothing)  # kept alive, since the library calls it
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = -1 if spec.device == "cuda" else 0
        file = _file(spec)
        self.model = lib.llama_model_load_from_file(str(file).encode(), settings)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {file}")
        self.context = lib.llama_init_from_model(self.model, self._context_params(spec, options))
        if not self.context:
            raise ValueError("llama.cpp cannot create a context; is there memory for its KV cache?")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(self.batch_tokens, 0, 1)
        self.versions = {"llama-cpp-python": lib.__version__}
        self.waiting: deque[tuple[int, list[int], int]] = deque()
        self.running: list[_Running] = []
        self.free_slots = list(range(self.num_slots - 1, -1, -1))
        self.num_batches = 0

    def begin(self) -> None:
        self.num_batches = 0

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        outputs: Tokens = [[] for _ in prompts]
        for i, (prompt, n) in enumerate(zip(prompts, output_lens, strict=True)):
            self.add(i, prompt, n)
        while self.waiting or self.running:
            for index, token_ids in self.poll(0):
                outputs[index] += token_ids
        return outputs

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        self.waiting.append((index, prompt, output_len))

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        """Compute one batch, choose the next tokens, and release finished sequences."""
        while self.waiting and self.free_slots:
            self.running.append(_Running(*self.waiting.popleft(), self.free_slots.pop()))
        rows = self._fill_batch()
        status = lib.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self.num_batches += 1
        new_tokens = []
        for row, sequence in rows:
            logits = lib.llama_get_logits_ith(self.context, row)
            token_id = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            sequence.output.append(token_id)
            new_tokens.append((sequence.index, [token_id]))
            if len(sequence.output) == sequence.output_len:
                memory = lib.llama_get_memory(self.context)
                lib.llama_memory_seq_rm(memory, sequence.slot, -1, -1)
                self.running.remove(sequence)
                self.free_slots.append(sequence.slot)
        return new_tokens

    def facts(self) -> dict[str, Any]:
        return {"sequences": self.num_slots, "batches": self.num_batches, **self.options}

    def _fill_batch(self) -> list[tuple[int, _Running]]:
        """Fill the batch, decode rows first. Returns the rows with logits and their sequences."""
        rows, self.batch.n_tokens = [], 0
        for sequence in sorted(self.running, key=lambda s: not s.output):
            if sequence.output:
                tokens, done = sequence.output[-1:], True
                first = len(sequence.prompt) + len(sequence.output) - 1
            else:
                first = sequence.num_computed
                room = self.batch_tokens - self.batch.n_tokens
                tokens = sequence.prompt[first : first + room]
                sequence.num_computed += len(tokens)
                done = sequence.num_computed == len(sequence.prompt)
            self._append(tokens, first, sequence.slot)
            if done and tokens:
                last = self.batch.n_tokens - 1
                self.batch.logits[last] = 1
                rows.append((last, sequence))
        return rows

    def _append(self, tokens: list[int], first: int, slot: int) -> None:
        batch = self.batch
        for i, token_id in enumerate(tokens, start=batch.n_tokens):
            batch.token[i], batch.pos[i] = token_id, first + i - batch.n_tokens
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, slot, 0
        batch.n_tokens += len(tokens)

    def _context_params(self, spec: Namespace, options: dict[str, Any]) -> Any:
        self.batch_tokens = spec.max_num_batched_tokens or _BATCH_TOKENS
        self.num_slots = min(spec.max_num_seqs or _MOST_SEQUENCES, len(spec.prompts))
        self.num_slots = max(2, min(self.num_slots, _MOST_SEQUENCES))  # the warm-up has two
        params = lib.llama_context_default_params()
        # Each sequence has a separate cache of equal size, which is rounded up to 256 tokens.
        params.n_ctx = self.num_slots * -(-max(total_lens(spec)) // 256) * 256
        params.n_seq_max, params.n_batch = self.num_slots, self.batch_tokens
        params.n_threads = params.n_threads_batch = spec.threads
        self.options = {"max_num_batched_tokens": self.batch_tokens, **options}
        for name, value in options.items():
            if name == "quantization":
                continue
            if name not in dict(params._fields_):
                raise ValueError(f"llama_context_params has no {name!r}")
            setattr(params, name, value)
        return params


def _plain(spec: Namespace) -> Path:
    model = Path(spec.model)
    return model if model.is_file() else Path(spec.scratch) / "model.gguf"


def _file(spec: Namespace) -> Path:
    quantization = spec.options.get("quantization")
    if quantization and Path(spec.model).is_file():
        raise ValueError(f"{spec.model} is already quantized; remove quantization={quantization!r}")
    return Path(spec.scratch) / f"model-{quantization}.gguf" if quantization else _plain(spec)


def _make(file: Path, write: Callable[[Path], None]) -> None:
    """Write a file unless it exists. It is renamed when complete, so it is never partial."""
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        write(unfinished)
        unfinished.rename(file)


def _quantize(plain: Path, target: Path, kind: str) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    names = (str(file).encode() for file in (plain, target))
    if lib.llama_model_quantize(*names, ctypes.byref(params)) != 0:
        raise ValueError(f"llama.cpp cannot quantize to {kind!r}")


def _print_nothing(level: int, text: bytes, user_data: Any) -> None:
    """Discard a log message, of which the library writes many when it loads a model."""
