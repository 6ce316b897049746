"""nanoserve/cli/bench/roofline.py: the limit counts what a step must read and compute, no more."""

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import DELTA_MOE, make_checkpoint
from transformers import Qwen3NextForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.precision import precision_of
from nanoserve.cli.bench.roofline import Need, Step, limit, planned_steps
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class
from nanoserve.worker.recurrent_states import RecurrentStates

# As their makers say.
BILLIONS = {
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5, "qwen2.5-0.5b": 0.494,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03,
}  # fmt: skip
QWEN3 = ModelConfig.from_hf(SHAPES["qwen3-0.6b"], {}, "bfloat16")


def step(*rows: tuple[int, int], num_logits: int | None = None) -> Step:
    """Rows are (new tokens, context with them)."""
    query_lens, context_lens = (np.array(column) for column in zip(*rows, strict=True))
    return Step(query_lens, context_lens, len(rows) if num_logits is None else num_logits)


def test_a_decode_step_reads_all_weights_and_all_kv() -> None:
    """Qwen3-0.6B: 596,049,920 parameters, of which 65,536 are norms; 112 KiB of KV per token."""
    weights, kv_per_token, embedding_row = 596_049_920 - 65_536, 114_688, 2 * 1024
    found = Need(QWEN3).bytes(step((1, 1000), (1, 24)))
    assert found == 2 * weights + 1024 * kv_per_token + 2 * embedding_row


def test_a_step_without_logits_reads_no_head() -> None:
    need = Need(QWEN3)
    without, with_logits = (step((512, 512), num_logits=n) for n in (0, 1))
    assert need.bytes(with_logits) - need.bytes(without) == 2 * 1024 * 151_936
    assert need.operations(with_logits) - need.operations(without) == 2 * 1024 * 151_936


def test_an_engine_is_held_to_its_own_bytes() -> None:
    """vLLM keeps the LM head in 16 bits, the others have it in as many as their linears."""
    plain, head = Need(QWEN3).bytes(step((1, 1))), 1024 * 151_936
    weights = 596_049_920 - 65_536 - head
    int8 = {"quantization": "int8"}
    found = {
        name: Need(QWEN3, precision_of(name, options, "bfloat16")).bytes(step((1, 1)))
        for name, options in {"vllm": int8, "nanoserve": int8, "transformers": {}}.items()
    }
    assert found == {
        "vllm": plain - weights,
        "nanoserve": plain - weights - head,
        "transformers": plain,
    }


def test_of_a_gguf_file_two_engines_keep_the_bits_that_it_has() -> None:
    found = {
        (name, *options): precision_of(name, options, "bfloat16", stored=4.5).weight_bits
        for name in ("nanoserve", "llama.cpp", "transformers")
        for options in ({}, {"quantization": "int8"})
        if not options or name == "nanoserve"
    }
    assert found == {
        ("nanoserve",): 4.5,
        ("nanoserve", "quantization"): 8,
        ("llama.cpp",): 4.5,
        ("transformers",): 16,
    }


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_queries_and_keys_are_counted_as_a_mask_counts_them(window: int | None) -> None:
    raw = SHAPES["tiny"] | {"sliding_window": window, "use_sliding_window": window is not None}
    raw |= {"max_window_layers": 2}
    config = ModelConfig.from_hf(raw, {}, "float32")
    rows, pairs, keys = [(1, 9), (4, 4), (3, 20)], 0, 0
    for layer_window in config.sliding_windows:
        for query_len, context_len in rows:
            query = np.arange(context_len - query_len, context_len)[:, None]
            key = np.arange(context_len)[None]
            mask = (key <= query) & (key > query - (layer_window or 1000))
            pairs, keys = pairs + mask.sum(), keys + mask.any(axis=0).sum()
    need, tokens = Need(config), 8
    products = tokens * need.dense + 3 * need.head
    assert need.operations(step(*rows)) == 2 * products + 2 * 2 * pairs * 8 * 32
    weights = need.dense + need.head + tokens * 192
    assert need.bytes(step(*rows)) == 4 * (weights + keys * 2 * 2 * 32)


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    raw = SHAPES["tiny"] | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    raw |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    need = Need(ModelConfig.from_hf(raw, {}, "bfloat16"))
    expert, layers = 3 * 192 * 64, 5
    attention = 2 * 192 * 32 * (8 + 2)
    assert need.dense == 6 * attention + 3 * 192 * 448 + layers * 192 * 8
    others = need.dense + need.head + 192 + 6 * 2 * 2 * 32  # with the embedding and the KV
    assert need.bytes(step((1, 1))) == pytest.approx(2 * (others + layers * 2 * expert))
    # 100 tokens miss an expert with probability (3/4)^100.
    many = need.bytes(step((100, 100))) - 2 * (
        need.dense + need.head + 100 * (192 + 6 * 2 * 2 * 32)
    )
    assert many == pytest.approx(2 * layers * 8 * expert)
    pairs = 6 * 8 * 32
    assert need.operations(step((1, 1))) == 2 * (
        need.dense + need.head + layers * 2 * expert + 2 * pairs
    )


def test_states_are_read_and_written_whatever_the_context(tmp_path: Path) -> None:
    make_checkpoint(Qwen3NextForCausalLM, tmp_path, **DELTA_MOE)
    config = ModelConfig.from_checkpoint(tmp_path)
    model = model_class(config.architecture)(config, LayerContext())
    others = ("norm", "conv_weight", "log_rate", "time_bias", "shared_expert_gate", "embed", "lm_")
    experts = ("mlp.gate_up", "mlp.down")
    weights = {n: p.numel() for n, p in model.named_parameters() if not any(o in n for o in others)}
    need = Need(config)
    found = sum(count for name, count in weights.items() if not name.endswith(experts))
    assert need.dense == found
    one_row = need.bytes(step((1, 40))) - need.bytes(step((1, 20)))
    assert one_row == 20 * 2 * 2 * 16 * 4  # the KV of 20 tokens in one layer
    states = RecurrentStates.of(EngineConfig("any"), config, LayerContext()).bytes_per_slot
    assert 4 * need.num_states == states
    two_rows = need.bytes(step((2, 20), (1, 20), num_logits=1)) - need.bytes(step((3, 20)))
    assert two_rows == 2 * states + 20 * 2 * 2 * 16 * 4


def test_the_planned_steps_are_those_that_the_engine_takes(checkpoint: Path) -> None:
    """A chunked prompt, a full batch, and prompts that share their beginning."""
    prompts, lens = [[5] * 40, [7] * 4, [5] * 37 + [8], [9, 9]], [3, 9, 2, 5]
    taken = []

    def observe(_plan: object, batch: object, _result: object, _times: object) -> None:
        rows = batch.header.num_rows
        query_lens = np.diff(batch.cu_seqlens_q[: rows + 1]).tolist()
        contexts = batch.context_lens[:rows].tolist()
        taken.append((query_lens, contexts, batch.header.num_outputs))

    options = {"max_num_seqs": 3, "max_num_batched_tokens": 32}
    options |= {"attention_backend": "torch"}  # which keeps weights as they are, to be counted
    with LLM(checkpoint, skip_tokenizer_init=True, **options) as llm:
        llm.engine.observers.append(observe)
        params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lens]
        llm.generate(prompts, params, use_tqdm=False)
        config, matrices = llm.engine.model_config, 0
        for name, parameter in llm.engine.executor.model.named_parameters():
            matrices += parameter.numel() if parameter.ndim == 2 and "embed" not in name else 0
        planned = list(planned_steps(llm.engine.config, prompts, lens))
    assert [(q.tolist(), c.tolist(), n) for q, c, n in planned] == taken
    assert len(taken) > max(lens) and max(sum(query_lens) for query_lens, *_ in taken) == 32
    need = Need(config)
    assert need.dense + need.head == matrices


def test_the_slower_of_memory_and_products_bounds_each_step() -> None:
    decode, prefill = step((1, 100)), step((2000, 2000))
    need, bandwidth, rate = Need(QWEN3), 1e10, 1e12
    memory, compute = need.bytes(decode) / bandwidth, need.operations(prefill) / rate
    assert memory > need.operations(decode) / rate and compute > need.bytes(prefill) / bandwidth
    found = limit(QWEN3, iter([decode, prefill]), bandwidth, rate)
    assert found.seconds == pytest.approx(memory + compute)
    assert found.num_steps == 2
    assert found.num_bytes == need.bytes(decode) + need.bytes(prefill)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_a_model_that_runs(shape: str) -> None:
    from nanoserve.models.registry import supported_architectures

    config = ModelConfig.from_hf(SHAPES[shape], {}, "bfloat16")
    assert config.architecture in supported_architectures()
    need = Need(config)
    weights = need.dense + need.head * (1 if config.tie_word_embeddings else 2)
    weights += need.num_moe_layers * need.expert * (config.moe.num_experts if config.moe else 0)
    assert shape not in BILLIONS or weights / 1e9 == pytest.approx(BILLIONS[shape], rel=0.01)
