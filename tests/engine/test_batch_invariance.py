"""A request's tokens and log-probabilities do not depend on its schedule, to the bit.

Each request of a random life of an engine (chunks, prefix hits, preemptions, draft tokens, aborts,
failures) is compared with the same request alone: no tolerance, in 16 bits and with fewer, too.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from model_fuzz import VOCAB_SIZE, Difference, ModelRun, reference_engine
from tiny_checkpoints import GEMMA2, make_checkpoint
from transformers import (
    Gemma2ForCausalLM,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from nanoserve import LLM, SamplingParams

pytest.importorskip("numba")

DRAFTS: list[dict[str, Any] | None] = [
    None,
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "suffix"},
]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


class Kind(NamedTuple):
    architecture: type[PreTrainedModel]
    settings: dict[str, Any]
    options: dict[str, Any]


KINDS = {
    "float32": Kind(Qwen3ForCausalLM, {}, {}),
    "bfloat16": Kind(Qwen3ForCausalLM, {}, {"dtype": "bfloat16"}),
    "int8 weights": Kind(Qwen3ForCausalLM, {}, {"dtype": "bfloat16", "quantization": "int8"}),
    "int4 weights": Kind(
        Qwen3ForCausalLM,
        {"hidden_size": 64, "intermediate_size": 96},
        {"quantization": "int4", "quantization_group_size": 32, "quantization_activations": "none"},
    ),
    # The weights of 16 tokens of a block share a scale here: a block must have as many in all runs.
    "int8 KV cache": Kind(
        Qwen3ForCausalLM,
        {},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8", "block_size": 16, "num_kv_blocks": 8},
    ),
    "fp8 KV cache": Kind(Qwen3ForCausalLM, {}, {"kv_cache_dtype": "fp8"}),
    "experts": Kind(Qwen3MoeForCausalLM, EXPERTS, {"dtype": "bfloat16"}),
    "a shared expert": Kind(
        Qwen2MoeForCausalLM,
        EXPERTS | {"shared_expert_intermediate_size": 48},
        {"dtype": "bfloat16"},
    ),
    "all heads normalised together": Kind(Olmo2ForCausalLM, {}, {"dtype": "bfloat16"}),
    "windows and GELU": Kind(  # three groups of layers, so that three times the blocks are needed
        Gemma2ForCausalLM,
        GEMMA2,
        {"dtype": "bfloat16", "block_size": 8, "num_kv_blocks": 40},
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def path(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("invariant")
    make_checkpoint(kind.architecture, path, vocab_size=VOCAB_SIZE, **kind.settings)
    return path


@pytest.fixture(scope="module")
def reference(kind: Kind, path: Path) -> Iterator[LLM]:
    options = kind.options | {"attention_backend": "numba", "batch_invariant": True}
    with reference_engine(path, **options) as llm:
        yield llm


def random_run(seed: int, kind: Kind, path: Path, reference: LLM) -> ModelRun:
    rng = random.Random(f"invariance of {seed}")
    drafts = rng.choice(DRAFTS)
    if drafts is not None:
        drafts = drafts | {"num_speculative_tokens": rng.choice([1, 4, 20]), "adaptive": False}
    return ModelRun(
        seed,
        path,
        reference,
        tolerance=0,
        **kind.options,
        attention_backend="numba",
        batch_invariant=True,
        speculative_config=drafts,
        num_threads=rng.choice([1, 2]),
    )


@pytest.mark.small(kind=["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_schedule(
    kind: Kind,
    path: Path,
    reference: LLM,
    by_size: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="nanoserve")  # requests are made to fail
    counts: Counter[str] = Counter()
    for seed in range(by_size(3, 8, 60)):
        run = random_run(seed, kind, path, reference)
        try:
            run.run()
        except (Difference, RuntimeError) as error:
            pytest.fail(f"seed {seed}, {run.options}: {error!r}")
        counts += run.counts
    print(dict(counts))
    # A few runs need not have all of these.
    wanted = ["requests", *by_size([], ["hit tokens", "preemptions"])]
    assert all(counts[name] for name in wanted), counts


def test_results_of_the_torch_backend_do_depend_on_it(tmp_path: Path) -> None:
    """The comparison sees last bits: with torch's kernels it finds differences."""
    make_checkpoint(Qwen3ForCausalLM, tmp_path, vocab_size=VOCAB_SIZE)
    options: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "torch"}
    with reference_engine(tmp_path, **options) as alone, pytest.raises(Difference, match="alone"):
        for seed in range(20):
            ModelRun(seed, tmp_path, alone, tolerance=0, **options).run()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.size("full"))])
def test_ranks_add_up_in_one_order(num_ranks: int, tmp_path: Path) -> None:
    """Gloo adds the parts of four ranks in an order that depends on the size of the tensor."""
    make_checkpoint(Qwen3ForCausalLM, tmp_path, vocab_size=VOCAB_SIZE)
    prompts = [[(7 * i * i + i) % VOCAB_SIZE for i in range(n)] for n in (70, 69, 40, 3, 1)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0)
    with LLM(
        tmp_path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=num_ranks,
        num_kv_blocks=64,
        batch_invariant=True,
    ) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("options", [{"attention_backend": "torch"}, {"dtype": "float16"}])
def test_what_cannot_be_promised_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"batch_invariant=True needs attention_backend='numba'"):
        LLM("tiny-qwen3", batch_invariant=True, **options)
