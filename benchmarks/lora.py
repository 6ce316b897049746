"""What LoRA adapters cost: decode steps of a batch with no, 1, 8 and 64 different adapters.

    python benchmarks/lora.py                              random weights of Qwen3-0.6B's shape
    python benchmarks/lora.py --model FOLDER --rank 16 --dtype bfloat16 --quantization int8
    python benchmarks/lora.py --layers 4 --rounds 3        a quick look

One engine without adapters, and one with `enable_lora`, take turns, so that a machine that slows
down slows all of them:

    off     an engine without `enable_lora`
    0       the other engine, no request with an adapter
    1 ...   that many different adapters, in turn, over all requests of the batch

All linear layers of attention and MLP are adapted. Printed is the median time of a decode step of
`--batch` sequences, the range of the rounds' medians, and the cost: the median over the rounds of a
round's time divided by that of "off" in the same round. Adapters are loaded before the rounds.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.features.lora.prepare import limits_of

# Qwen3-0.6B's config.json; its weights do not matter here.
QWEN3 = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024},
    **{"intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
    **{"head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 28, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": True},
    "rope_theta": 1000000.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder of a checkpoint; by default random weights")
    parser.add_argument("--layers", type=int, default=28, help="of the random model")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 1, 8, 64])
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(args, Path(temporary))


def run(args: argparse.Namespace, folder: Path) -> None:
    options: dict[str, Any] = {"dtype": args.dtype, "skip_tokenizer_init": True}
    options |= {"quantization": args.quantization, "max_num_seqs": args.batch}
    options |= {"block_size": 16, "num_kv_blocks": args.batch * 4, "max_model_len": 64}
    model = args.model
    if model is None:
        (folder / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": args.layers}))
        model, options["load_format"] = str(folder), "dummy"
    most = max(args.counts)
    lora = {"enable_lora": True, "max_loras": max(1, most), "max_lora_rank": args.rank}
    with LLM(model, **options) as plain, LLM(model, **options, **lora) as adapted:
        adapters = write_adapters(adapted, folder, most, args.rank)
        names = ["off", *map(str, args.counts)]
        times: dict[str, list[float]] = {name: [] for name in names}
        for index in range(args.rounds + 1):
            for name in names if index % 2 else reversed(names):
                llm, count = (plain, 0) if name == "off" else (adapted, int(name))
                median = decode(llm, adapters[:count], args.batch, args.steps)
                if index:  # the first round loads adapters, and compiles
                    times[name].append(median)
    for name in names:
        costs = [one / off - 1 for one, off in zip(times[name], times["off"], strict=True)]
        low, high = min(times[name]), max(times[name])
        print(
            f"{name:>4} adapters: {1e3 * statistics.median(times[name]):8.2f} ms "
            f"({1e3 * low:.2f} to {1e3 * high:.2f})   cost {100 * statistics.median(costs):6.1f} % "
            f"({100 * min(costs):.1f} to {100 * max(costs):.1f})"
        )


def write_adapters(llm: LLM, folder: Path, count: int, rank: int) -> list[LoRARequest]:
    """Write random adapters of all linear layers."""
    shapes = limits_of(llm.engine.config, llm.engine.model_config).shapes
    requests = []
    for number in range(1, count + 1):
        own = folder / f"adapter{number}"
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
        tensors = {}
        for name, (outputs, inputs) in shapes.items():
            start = f"base_model.model.{name}.lora"
            tensors[f"{start}_A.weight"] = 0.01 * torch.randn(rank, inputs)
            tensors[f"{start}_B.weight"] = 0.01 * torch.randn(outputs, rank)
        save_file({k: x.bfloat16() for k, x in tensors.items()}, own / "adapter_model.safetensors")
        requests.append(LoRARequest(own.name, number, str(own)))
    return requests


def decode(llm: LLM, adapters: list[LoRARequest], batch: int, steps: int) -> float:
    """Return the median time of a decode step of `batch` sequences, in seconds.

    It is infinite if they never ran together, while adapters were read.
    """
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
    for index in range(batch):
        adapter = adapters[index % len(adapters)] if adapters else None
        prompt = [1 + index % 100, 2, 3, 4]
        engine.add_request(str(index), prompt, params, lora_request=adapter)
    times = []
    while engine.has_unfinished_requests():
        running = len(engine.scheduler.running)
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        if running == batch == len(engine.scheduler.running):
            times.append(seconds)
    return statistics.median(times) if times else math.inf


if __name__ == "__main__":
    main()
