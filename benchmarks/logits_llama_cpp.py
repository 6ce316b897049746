"""Run llama.cpp's logits of every prompt token and its quantizer, for `quality_real.py`.

    python benchmarks/quality.py --model smollm2 --llama-cpp PYTHON

That starts this file with PYTHON, which has llama-cpp-python and needs nothing of nanoserve:

    PYTHON benchmarks/logits_llama_cpp.py JOB.json

A job has `file`, a GGUF file, and either `kind` and `target` (quantize it, as its `llama-quantize`
does) or `prompts`, `target` (numpy's format), `threads` and `context` (fields of
`llama_context_params`; the name of a type where one is wanted).
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np


def quantize(job: dict[str, Any]) -> None:
    """Write `target`. Raises `ValueError` if the library fails."""
    params = lib.llama_model_quantize_default_params()
    name = "ALL_F32" if job["kind"] == "F32" else f"MOSTLY_{job['kind']}"
    params.ftype = getattr(lib, f"LLAMA_FTYPE_{name}")
    params.nthread, params.allow_requantize = job["threads"], True
    files = (str(job[name]).encode() for name in ("file", "target"))
    if lib.llama_model_quantize(*files, ctypes.byref(params)) != 0:
        raise ValueError(f"llama.cpp cannot quantize {job['file']} to {job['kind']}")


def logits(job: dict[str, Any]) -> None:
    """Write float32 [sum(len(prompt) - 1), vocab_size] to `target`."""
    longest = max(map(len, job["prompts"]))
    settings = lib.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(job["file"].encode(), settings)
    if not model:
        raise ValueError(f"llama.cpp cannot load {job['file']}")
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = -(-longest // 256) * 256
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = job["threads"]
    for name, value in job["context"].items():
        is_type = name in ("type_k", "type_v")
        setattr(params, name, getattr(lib, f"GGML_TYPE_{value}") if is_type else value)
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise ValueError(f"llama.cpp cannot make a context with {job['context']}")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(longest, 0, 1)
    shape = (sum(len(prompt) - 1 for prompt in job["prompts"]), vocab_size)
    found = np.lib.format.open_memmap(job["target"], "w+", np.float32, shape)
    first = 0
    for prompt in job["prompts"]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch.n_tokens = len(prompt)
        for place, token_id in enumerate(prompt):
            batch.token[place], batch.pos[place] = token_id, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        status = lib.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        # All of a batch lie one behind the other, in its order.
        pointer, count = lib.llama_get_logits(context), len(prompt) - 1
        found[first : first + count] = np.ctypeslib.as_array(pointer, (count, vocab_size))
        first += count
    found.flush()


def _print_warnings(level: int, text: bytes, user_data: Any) -> None:
    """Print warnings of the library, which logs a lot; level 3 is an error."""
    if level == 3:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    lib.llama_backend_init()
    callback = lib.llama_log_callback(_print_warnings)  # kept: the library calls it
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    if "kind" in job:
        quantize(job)
    else:
        logits(job)


if __name__ == "__main__":
    main()
