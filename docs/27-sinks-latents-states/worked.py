"""Chapter 27's numbers: sinks, latents and recurrent states, and what each of them costs.

Configurations are those of published models. Sizes and small cases are computed by the engine's own
code; times are lower bounds from the data sheet of an H100.
"""

import math
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from tables import table
from torch import Tensor

from nanoserve.checkpoint.formats.mxfp4 import MXFP4_GROUP, mxfp4_matrix
from nanoserve.checkpoint.mla_config import MLAConfig
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.kv_groups import kv_cache_groups
from nanoserve.engine.sequence_room import SequenceRoom
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.delta_rule import DeltaInputs, delta_step
from nanoserve.models.layers.latent_attention import LatentUpProjection
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.worker.kv_cache import KVCacheLayout
from nanoserve.worker.recurrent_states import RecurrentStates

BANDWIDTH, RATE = 3.35e12, 989e12  # of an H100: bytes, and bfloat16 operations, per second
_COMMON = {
    "eos_token_id": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_MLA = {
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10_000,
    "v_head_dim": 128,
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4_096,
    "type": "yarn",
}
_DELTA = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
}
# The entries of each config.json that sizes depend on, and those that must be there.
_FILES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _EXPERTS
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262_144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_theta": 10_000_000,
        "vocab_size": 151_936,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4_096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201_088,
    },
    "DeepSeek-V2-Lite": _MLA
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "q_lora_rank": None,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102_400,
    },
    "DeepSeek-V3": _MLA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "q_lora_rank": 1536,
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129_280,
    },
    "Qwen3-Next-80B-A3B": _DELTA
    | _EXPERTS
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151_936,
    },
    "Qwen3.5-27B": _DELTA
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "vocab_size": 248_320,
    },
}


@cache
def model(name: str) -> ModelConfig:
    return ModelConfig.from_hf(_COMMON | _FILES[name], {})


# ---------------------------------------------------------------- what a sequence takes


def token_bytes(name: str) -> int:
    """Bytes of a token in the cache, over all layers, if all of them keep it."""
    return model(name).kv_bytes_per_token()


@cache
def states(name: str) -> RecurrentStates:
    """The states that the layers of a model declare."""
    return RecurrentStates.of(EngineConfig("any"), model(name), LayerContext())


def state_bytes(name: str) -> int:
    """Bytes of a sequence's recurrent states, over all layers."""
    return states(name).bytes_per_slot


def sequence_bytes(name: str, num_tokens: int, block_size: int = 16) -> int:
    """Bytes that a sequence in decode takes: blocks of all its groups, and states."""
    groups = kv_cache_groups(EngineConfig("any"), model(name))
    room = SequenceRoom([group.window for group in groups], block_size, max_step_tokens=1)
    of_block = block_size * token_bytes(name) // len(groups)
    return room.num_blocks(num_tokens) * of_block + state_bytes(name)


def memory_table(lengths: Sequence[int]) -> str:
    """Table: what a sequence of each model takes."""
    kept = {
        "Qwen3-30B-A3B": "K and V of all tokens, in 48 layers",
        "gpt-oss-20b": "the same in 12 layers, of the last 128 in 12 others",
        "DeepSeek-V2-Lite": "a latent for each token, in 27 layers",
        "DeepSeek-V3": "a latent for each token, in 61 layers",
        "Qwen3-Next-80B-A3B": "K and V in 12 layers, a state in 36",
        "Qwen3.5-27B": "K and V in 16 layers, a state in 48",
    }
    rows = []
    for name, words in kept.items():
        sizes = (f"{sequence_bytes(name, length) / 2**20:,.0f} MiB" for length in lengths)
        rows.append((name, words, f"{token_bytes(name):,}", _mib(state_bytes(name)), *sizes))
    head = ("model", "what it keeps", "bytes of a new token", "state")
    return table((*head, *(f"{length:,} tokens" for length in lengths)), rows)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count else ""


# ---------------------------------------------------------------- sinks


def weights(scores: Sequence[float], sink: float = -math.inf) -> ndarray:
    """The weights of the keys in a softmax that has a sink as well."""
    largest = max(sink, *scores)
    terms = np.exp(np.array(scores) - largest)
    return terms / (terms.sum() + math.exp(sink - largest))


def sink_table(cases: dict[str, Sequence[float]], sink: float) -> str:
    """Table: the weights of keys without and with a sink."""
    rows = []
    for name, scores in cases.items():
        plain, own = weights(scores), weights(scores, sink)
        shown = (", ".join(f"{x:.3f}" for x in each) for each in (plain, own))
        rows.append((name, ", ".join(f"{x:g}" for x in scores), *shown, f"{own.sum():.3f}"))
    return table(("the head", "scores", "plain softmax", f"with a sink of {sink:g}", "sum"), rows)


Partial = tuple[float, float, float]  # largest score, sum of exponentials, the same with values
Keys = Sequence[tuple[float, float]]  # score and value of each
NOTHING: Partial = (-math.inf, 0.0, 0.0)


def merge(first: Partial, second: Partial) -> Partial:
    """Two partial results as one: both are rescaled to the larger of the two largest scores."""
    largest = max(first[0], second[0])
    scales = [math.exp(part[0] - largest) for part in (first, second)]
    return (
        largest,
        *(
            sum(s * part[i] for s, part in zip(scales, (first, second), strict=True))
            for i in (1, 2)
        ),
    )


def add_keys(part: Partial, keys: Keys) -> Partial:
    """The online softmax: a partial result, and some keys more."""
    for score, value in keys:
        part = merge(part, (score, 1.0, value))
    return part


def with_sink(part: Partial, sink: float) -> Partial:
    """A sink counts in the sum, and has no value."""
    return merge(part, (sink, 1.0, 0.0))


def shared_result(tiles: Sequence[Keys], sink: float, counted: Sequence[int]) -> Partial:
    """Attention over shares that are merged; those in `counted` have counted the sink."""
    merged = NOTHING
    for number, keys in enumerate(tiles):
        part = add_keys(NOTHING, keys)
        merged = merge(merged, with_sink(part, sink) if number in counted else part)
    return merged


def shares_table(tiles: Sequence[Keys], sink: float) -> str:
    """Table: the result if none, one or all of the shares count the sink."""
    cases = [
        ("in no share", ()),
        ("in the first share", (0,)),
        ("in the last share", (len(tiles) - 1,)),
        ("in every share", range(len(tiles))),
    ]
    rows = []
    for name, counted in cases:
        largest, total, sums = shared_result(tiles, sink, counted)
        keys = sum(math.exp(score - largest) for tile in tiles for score, _ in tile)
        rows.append((name, f"{sums / total:.3f}", f"{keys / total:.3f}"))
    return table(("the sink is counted", "result", "weights of all keys"), rows)


def mxfp4_table(codes: Sequence[int], exponent: int) -> str:
    """Table: the first bytes of a group, each as two values, by the engine's reader."""
    packed = torch.zeros(1, MXFP4_GROUP // 2, dtype=torch.uint8)
    packed[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    matrix = mxfp4_matrix(packed, torch.tensor([[exponent]], dtype=torch.uint8), "the example")
    values = (matrix.codes.float() * matrix.scale).flatten().tolist()
    rows = []
    for place, byte in enumerate(codes):
        low, high = byte & 15, byte >> 4
        pair = values[2 * place : 2 * place + 2]
        bits = [f"{nibble >> 3} {nibble >> 1 & 3:02b} {nibble & 1}" for nibble in (low, high)]
        before = [f"{value / 2.0 ** (exponent - 127):g}" for value in pair]
        cells = (" and ".join(each) for each in (bits, before, [f"{x:g}" for x in pair]))
        rows.append((f"0x{byte:02X}", *cells))
    head = ("byte", "sign, exponent, fraction: low, high half", "E2M1 values", "times the scale")
    return table(head, rows)


def mxfp4_bytes() -> float:
    """Bytes of a parameter: 32 codes of four bits and a scale of eight."""
    return (MXFP4_GROUP / 2 + 1) / MXFP4_GROUP


def expert_parameters(name: str) -> int:
    """Parameters of all experts' matrices, in all layers."""
    config = model(name)
    each = 3 * config.hidden_size * config.moe.intermediate_size
    return config.num_hidden_layers * config.moe.num_experts * each


# ---------------------------------------------------------------- latents

W_UK = [[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]]  # of the example's head: a latent of 2, a key of 3
W_UV = [[1.0, 1.0], [0.0, 2.0]]
QUERY, LATENTS = [1.0, -1.0, 2.0], [[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]]


def up_projection() -> LatentUpProjection:
    """The engine's module with the example's matrices."""
    mla = MLAConfig(2, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=2)
    config: Any = SimpleNamespace(mla=mla, num_attention_heads=1)
    module = LatentUpProjection(config, LayerContext(dtype=torch.float32))
    module.weight.data.copy_(torch.tensor(W_UK + W_UV))
    return module


def absorbed_query() -> list[float]:
    """W_UK^T q, by the engine."""
    return up_projection().absorb(torch.tensor([[QUERY]])).flatten().tolist()


def value_of(latent: Sequence[float]) -> list[float]:
    """W_UV c, by the engine."""
    return up_projection().values(torch.tensor([[list(latent)]])).flatten().tolist()


def absorbed_table() -> str:
    """Table: scores and values of the example in both forms."""
    q, own, rows = np.array(QUERY), np.array(absorbed_query()), []
    for token, latent in enumerate(LATENTS):
        key = np.array(W_UK) @ latent
        scores = (f"{x:g}" for x in (q @ key, own @ latent))
        rows.append((token, _row(latent), _row(key), *scores, _row(value_of(latent))))
    head = ("token", "latent c", "key W_UK c", "q · key", "q' · c", "value W_UV c")
    return table(head, rows)


def rows_of(name: str) -> str:
    """The example's matrices and queries, in words."""
    absorbed = absorbed_query()
    rows = {"W_UK": W_UK, "W_UV": W_UV, "QUERY": [QUERY], "absorbed": [absorbed]}[name]
    *first, last = (f"({_row(row)})" for row in rows)
    return f"{', '.join(first)} and {last}" if first else last


def absorbed_values(shares: Sequence[float], name: str) -> str:
    """The sums of values and of latents with some weights, and the value of the second sum."""
    values = np.array([value_of(latent) for latent in LATENTS])
    latent = np.array(shares) @ np.array(LATENTS)
    sums = {
        "values": np.array(shares) @ values,
        "latents": latent,
        "value of latents": value_of(latent.tolist()),
    }
    return f"({_row(sums[name])})"


def _row(numbers: Sequence[float] | ndarray) -> str:
    return ", ".join(f"{x:g}" for x in numbers)


class Form:
    """How often numbers are read and multiplied for a cached token in a layer, for one query."""

    def __init__(self, name: str, form: str) -> None:
        config = model(name)
        mla, heads = config.mla, config.num_attention_heads
        of_heads = heads * (mla.head_dim + mla.v_head_dim)
        cached = mla.kv_heads.head_dim
        expanding = heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
        self.layers = config.num_hidden_layers
        self.read, self.products = {
            "heads": (of_heads, of_heads),
            "expanded": (cached, of_heads + expanding),
            "absorbed": (cached, heads * (cached + mla.kv_lora_rank)),
        }[form]

    @property
    def intensity(self) -> float:
        """Operations for each byte that is read in 16 bits; a product and a sum are two."""
        return 2 * self.products / (2 * self.read)

    def milliseconds(self, length: int) -> tuple[float, float]:
        """Reading and computing, in a decode step of one sequence, over all layers."""
        tokens = 1e3 * self.layers * length
        return 2 * self.read * tokens / BANDWIDTH, 2 * self.products * tokens / RATE


def forms_table(name: str, length: int) -> str:
    """Table: attention of one decode row in three forms."""
    words = {
        "heads": "K and V of heads are cached",
        "expanded": "latents are cached, K and V computed again",
        "absorbed": "latents are cached, queries absorbed",
    }
    rows = []
    for key, said in words.items():
        form = Form(name, key)
        reading, computing = form.milliseconds(length)
        counts = (f"{form.read:,}", f"{form.products:,}", f"{form.intensity:,.0f}")
        rows.append((said, *counts, f"{reading:.2f} ms", f"{computing:.2f} ms"))
    head = ("form", "numbers read", "products", "operations a byte", "reading", "computing")
    return table(head, rows)


def expanding_pays(name: str) -> int:
    """New tokens of a chunk from which keys and values of heads take fewer products in a long
    context: expanding a cached token is done once for all of them."""
    heads, expanded, absorbed = (Form(name, form) for form in ("heads", "expanded", "absorbed"))
    once = expanded.products - heads.products
    return math.ceil(once / (absorbed.products - heads.products))


def rank_bytes(name: str, ranks: int) -> int:
    """Bytes of a token on one of some ranks, by the layout that the worker allocates."""
    parallel = ParallelContext(TensorParallel(0, ranks))
    engine, config = EngineConfig("any", max_num_seqs=1), model(name)
    layout = KVCacheLayout.of(engine, config, LayerContext(parallel=parallel))
    return config.num_kv_layers * layout.spec.block_bytes // engine.block_size


def ranks_table(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Table: bytes of a token on each rank."""
    rows = [(name, *(f"{rank_bytes(name, count):,}" for count in ranks)) for name in names]
    return table(
        ("bytes of a token on each of", *(f"{count} rank{'s' * (count > 1)}" for count in ranks)),
        rows,
    )


def yarn_factor(name: str) -> float:
    """By which cos and sin of a plain transformer would be multiplied, and whole heads are here."""
    config = model(name)
    return math.sqrt(config.attention_scale * math.sqrt(config.mla.head_dim))


# ---------------------------------------------------------------- recurrent states

# Decay, key, value, beta of the example's tokens. The third has the key of the first.
TOKENS = [
    (1.0, (1.0, 0.0), (2.0, 4.0), 1.0),
    (0.5, (0.0, 1.0), (6.0, 0.0), 1.0),
    (1.0, (1.0, 0.0), (3.0, 2.0), 1.0),
    (0.5, (0.6, 0.8), (1.0, 4.0), 0.5),
]


def delta_inputs(decay: float, k: Sequence[float], v: Sequence[float], beta: float) -> DeltaInputs:
    """The engine's inputs of a token, for one row and one head; the query is the key."""
    key, value = torch.tensor(k).view(1, 1, -1), torch.tensor(v).view(1, 1, -1)
    g, rate = torch.tensor([[math.log(decay)]]), torch.tensor([[beta]])
    return DeltaInputs(key, key, value, g, rate)


def after_tokens(count: int) -> Tensor:
    """The state after the example's first tokens, by the engine: float32 [2, 2]."""
    state = torch.zeros(1, 1, 2, 2)
    for token in TOKENS[:count]:
        delta_step(delta_inputs(*token), state)
    return state[0, 0]


def corrections() -> ndarray:
    """What each token adds for its key, [tokens, 2]."""
    found = []
    for index, (decay, k, v, beta) in enumerate(TOKENS):
        predicted = decay * np.array(k) @ after_tokens(index).double().numpy()
        found.append(beta * (np.array(v) - predicted))
    return np.array(found)


def delta_table() -> str:
    """Table: the rule token by token."""
    rows = []
    for index, (decay, k, v, beta) in enumerate(TOKENS):
        predicted = decay * np.array(k) @ after_tokens(index).double().numpy()
        state = after_tokens(index + 1).double().numpy()
        cells = (_rounded(x) for x in (predicted, corrections()[index], *state))
        rows.append((index, f"{decay:g}", _row(k), _row(v), f"{beta:g}", *cells))
    head = ("token", "decay", "k", "v", "beta", "predicted", "correction", "S, row 1", "S, row 2")
    return table(head, rows)


def _rounded(numbers: ndarray) -> str:
    return ", ".join(f"{round(float(x), 4) + 0.0:g}" for x in numbers)


def system() -> ndarray:
    """How much of each earlier correction a token finds in the state for its key, times beta."""
    keys = np.array([k for _, k, _, _ in TOKENS])
    logs = np.cumsum([math.log(decay) for decay, _, _, _ in TOKENS])
    betas = np.array([[beta] for _, _, _, beta in TOKENS])
    return np.tril(betas * np.exp(logs[:, None] - logs) * (keys @ keys.T), -1)


def chunk_table() -> str:
    """Table: the same tokens as one chunk, from a state of zeros: a triangular system."""
    values = np.array([v for _, _, v, _ in TOKENS])
    betas = np.array([[beta] for _, _, _, beta in TOKENS])
    solved, rows = np.linalg.solve(np.eye(len(TOKENS)) + system(), betas * values), []
    for index, factors in enumerate(system()):
        terms = [f"{x:g} u{j}" for j, x in enumerate(factors) if abs(x) > 1e-9]
        own = _rounded(betas[index] * values[index])
        rows.append((f"u{index}", own, " + ".join(terms), _rounded(solved[index])))
    return table(("correction", "beta v", "minus", "is"), rows)


def prompt_seconds(name: str, num_tokens: int, chunk: int) -> float:
    """Time to read and write all states once for each chunk of a prompt."""
    return 2 * state_bytes(name) * math.ceil(num_tokens / chunk) / BANDWIDTH


def rounding_table(num_tokens: int, rate: float) -> str:
    """Table: two numbers of a state that is stored in some data type after each token."""
    rows = []
    exact = (1 - rate) ** num_tokens, 1 + num_tokens * rate
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kept, grown = torch.ones((), dtype=dtype), torch.ones((), dtype=dtype)
        for _ in range(num_tokens):
            kept = (kept.float() * (1 - rate)).to(dtype)
            grown = (grown.float() + rate).to(dtype)
        rows.append(
            (str(dtype).removeprefix("torch."), f"{kept.item():.3f}", f"{grown.item():.3f}")
        )
    rows.append(("exact", *(f"{x:.3f}" for x in exact)))
    return table(("stored as", f"1 x {1 - rate:g}, {num_tokens:,} times", f"1 + {rate:g}"), rows)


def parts_of_a_slot(name: str) -> dict[str, int]:
    """Bytes of the states of one layer, by name."""
    spec = next(iter(states(name).specs.values()))
    return {key: 4 * math.prod(shape) for key, shape in spec.shapes.items()}


def replaced_bytes(name: str) -> int:
    """Bytes a token would take in the layers with states, had they the model's KV heads."""
    config = model(name)
    return token_bytes(name) // config.num_kv_layers * len(config.recurrent_layers)


def break_even(name: str) -> int:
    """Tokens from which a state takes less memory than K and V in the same layers."""
    return math.ceil(state_bytes(name) / replaced_bytes(name))


def states_table(names: Sequence[str], num_seqs: int) -> str:
    """Table: states of a layer and of a sequence, and where they begin to save memory."""
    rows = []
    for name in names:
        parts, of_all = parts_of_a_slot(name), num_seqs * state_bytes(name)
        step = 2 * of_all / BANDWIDTH
        sizes = (f"{parts['recurrent']:,}", f"{parts['conv']:,}", _mib(state_bytes(name)))
        of_batch = (f"{of_all / 2**30:.1f} GiB", f"{1e3 * step:.0f} ms")
        rows.append((name, *sizes, f"{break_even(name):,} tokens", *of_batch))
    head = ("model", "S of a layer, bytes", "its convolution", "a sequence", "breaks even at")
    return table((*head, f"{num_seqs} sequences", "to read and write these"), rows)
