"""`logprobs_mode`: log-probabilities of the distribution that a token is sampled from.

The expected distributions are computed from transformers' logits, with its logits processors.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from serving import ask, served
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    Qwen3ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoserve import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.engine.executor import SlotUpdate
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling.sampler import Sampler
from nanoserve.serve.async_llm import AsyncLLM

PATH = bundled_checkpoint("tiny-qwen3")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_blocks": 400,
    "max_logprobs": -1,
    "logprobs_mode": "processed_logprobs",
}
PROMPT = "A KV cache keeps the keys and values of all earlier tokens. A KV cache keeps the"
# By name: sampling parameters, and the same as processors of transformers. Filters are in the
# engine's order.
SETTINGS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "greedy": ({"temperature": 0}, []),
    "greedy, filters": ({"temperature": 0, "top_k": 2, "top_p": 0.5}, []),
    "greedy, penalty": (
        {"temperature": 0, "repetition_penalty": 1.3},
        [RepetitionPenaltyLogitsProcessor(1.3)],
    ),
    "plain": ({}, []),
    "temperature": ({"temperature": 1.7}, [TemperatureLogitsWarper(1.7)]),
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top_p": (
        {"temperature": 1.3, "top_p": 0.8},
        [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)],
    ),
    "min_p": (
        {"temperature": 2.0, "min_p": 0.02},
        [TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.02)],
    ),
    "all": (
        {
            "temperature": 2.5,
            "repetition_penalty": 1.2,
            "min_p": 0.001,
            "top_k": 40,
            "top_p": 0.9,
        },
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(2.5),
            MinPLogitsWarper(0.001),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.fixture(scope="module")
def reference() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-qwen3", **OPTIONS) as llm:
        yield llm


@torch.inference_mode()
def distributions(
    reference: Qwen3ForCausalLM,
    output: RequestOutput,
    processors: list[Any],
    softmax: bool = True,
) -> torch.Tensor:
    """The expected log-probabilities of each output token, float32 [num_tokens, vocab_size]."""
    prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
    token_ids = torch.tensor([prompt + generated])
    logits = reference(token_ids).logits[0, len(prompt) - 1 : -1].float()
    process = LogitsProcessorList(processors)
    for index in range(len(generated)):
        before = token_ids[:, : len(prompt) + index]
        logits[index] = process(before, logits[index : index + 1])[0]
    return logits.log_softmax(-1) if softmax else logits


def found(completion: CompletionOutput, size: int) -> torch.Tensor:
    """The log-probabilities of a completion that requested those of the whole vocabulary."""
    rows = torch.full((len(completion.token_ids), size), math.nan)
    for row, candidates in zip(rows, completion.logprobs or [], strict=True):
        for token_id, candidate in candidates.items():
            row[token_id] = candidate.logprob
    return rows


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.isneginf(), expected.isneginf())
    is_kept = expected.isfinite()
    # The forward passes differ, too: by 1e-5 of a logit.
    torch.testing.assert_close(found[is_kept], expected[is_kept], atol=1e-5, rtol=1e-5)


def forbid(*token_ids: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def process(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[:, list(token_ids)] = -math.inf
        return logits

    return process


def check(llm: LLM, reference: Any, params: list[SamplingParams], expected: list[Any]) -> None:
    """Check requests of one batch. expected: for each the processors of transformers."""
    size = llm.engine.model_config.vocab_size
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for output, processors in zip(outputs, expected, strict=True):
        (completion,) = output.outputs
        rows = found(completion, size)
        expected_rows = distributions(reference, output, processors)
        assert_close(rows, expected_rows)
        tokens = range(len(rows)), completion.token_ids
        chosen = rows[tokens].tolist()
        assert chosen == pytest.approx(expected_rows[tokens].tolist(), abs=1e-5)
        assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


def test_they_are_those_of_the_distribution_that_is_sampled_from(llm: LLM, reference) -> None:
    size = llm.engine.model_config.vocab_size
    params = [
        SamplingParams(**settings, seed=i, max_tokens=12, ignore_eos=True, logprobs=size)
        for i, (settings, _) in enumerate(SETTINGS.values())
    ]
    check(llm, reference, params, [processors for _, processors in SETTINGS.values()])


def test_masks_biases_and_own_processors_count(llm: LLM, reference) -> None:
    size, eos = llm.engine.model_config.vocab_size, llm.engine.input_processor.eos_token_ids
    calls: list[int] = []

    def own(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(output_token_ids))
        return logits * 0.5

    allowed = list(range(300, 400))
    others = [i for i in range(size) if i not in allowed]
    cases: list[tuple[dict[str, Any], list[Any]]] = [
        ({"allowed_token_ids": allowed}, [forbid(*others)]),
        ({"min_tokens": 8, "ignore_eos": False}, [forbid(*eos)]),
        ({"logit_bias": {310: 4.0}}, [lambda _, x: x.index_add(1, torch.tensor([310]), _four(x))]),
        ({"logits_processors": [own], "top_k": 9}, [lambda _, x: x * 0.5, TopKLogitsWarper(9)]),
    ]
    params = [
        SamplingParams(**{"ignore_eos": True, **settings}, max_tokens=8, seed=5, logprobs=size)
        for settings, _ in cases
    ]
    check(llm, reference, params, [processors for _, processors in cases])
    assert calls == list(range(8))  # once per token, as without log-probabilities


def _four(logits: torch.Tensor) -> torch.Tensor:
    return torch.full((len(logits), 1), 4.0)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_grammar_forbids_with_negative_infinity(llm: LLM, temperature: float) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    size = llm.engine.model_config.vocab_size
    choice = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=9, logprobs=size, structured_outputs=choice
    )
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    (completion,) = output.outputs
    rows = found(completion, size)
    assert completion.text in ("yes", "no") and not rows.isnan().any()
    torch.testing.assert_close(rows.exp().sum(-1), torch.ones(len(rows)))
    decode = llm.engine.tokenizer.decode
    allowed = {decode([i]) for i in rows[0].isfinite().nonzero().flatten().tolist()}
    assert all("yes".startswith(text) or "no".startswith(text) for text in allowed)


def test_tokens_do_not_depend_on_the_mode(llm: LLM) -> None:
    params = [
        SamplingParams(**settings, seed=i, max_tokens=12, logprobs=2)
        for i, (settings, _) in enumerate(SETTINGS.values())
    ]
    prompts = [PROMPT] * len(params)
    here = llm.generate(prompts, params, use_tqdm=False)
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=400) as raw:
        there = raw.generate(prompts, params, use_tqdm=False)
    for one, other in zip(here, there, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert here[0].outputs[0].logprobs[0] == there[0].outputs[0].logprobs[0]  # greedy: the same


@pytest.mark.parametrize(
    "options",
    [
        {
            "speculative_config": {
                "method": "draft_model",
                "model": "tiny-qwen3-draft",
                "adaptive": False,
            }
        },
        {"async_scheduling": True},
        {"attention_backend": "torch"},  # and torch's sampler
    ],
    ids=["drafts", "async", "torch"],
)
def test_they_do_not_depend_on_other_options(llm: LLM, options: dict[str, Any]) -> None:
    params = [
        SamplingParams(**settings, seed=i, max_tokens=20, ignore_eos=True, logprobs=6)
        for i, (settings, _) in enumerate(SETTINGS.values())
    ]
    prompts = [PROMPT] * len(params)
    expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM("tiny-qwen3", **OPTIONS, **options) as other:
        outputs = other.generate(prompts, params, use_tqdm=False)
        if "speculative_config" in options:
            assert other.stats.num_accepted_tokens > 0
    for one, two in zip(expected, outputs, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        _assert_same(one.outputs[0].logprobs, two.outputs[0].logprobs)


def _assert_same(one: Any, two: Any) -> None:
    for a, b in zip(one, two, strict=True):
        assert list(a) == list(b) and [x.rank for x in a.values()] == [x.rank for x in b.values()]
        values = [[x.logprob for x in each.values()] for each in (a, b)]
        assert values[0] == pytest.approx(values[1], abs=2e-5, rel=1e-5)


def test_two_ranks_give_the_same(llm: LLM) -> None:
    params = SamplingParams(top_k=3, seed=0, max_tokens=8, logprobs=5)
    (expected,) = llm.generate([PROMPT], params, use_tqdm=False)
    with LLM("tiny-qwen3", **OPTIONS, tensor_parallel_size=2) as two:
        (output,) = two.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    _assert_same(output.outputs[0].logprobs, expected.outputs[0].logprobs)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_returned_on_request(reference, mode: str) -> None:
    settings, processors = SETTINGS["all"]
    with LLM("tiny-qwen3", **OPTIONS | {"logprobs_mode": mode}) as llm:
        size = llm.engine.model_config.vocab_size
        params = SamplingParams(**settings, seed=3, max_tokens=6, logprobs=size, prompt_logprobs=0)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        with pytest.raises(ValueError, match=f"logprobs_mode='{mode}' returns logits"):
            llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=2))
    processors = processors if mode == "processed_logits" else []
    expected = distributions(reference, output, processors, softmax=False)
    rows = found(output.outputs[0], size)
    assert torch.equal(rows.isneginf(), expected.isneginf())
    is_kept = expected.isfinite()
    torch.testing.assert_close(rows[is_kept], expected[is_kept], atol=1e-4, rtol=1e-5)
    assert output.prompt_logprobs[1][output.prompt_token_ids[1]].logprob < 0  # not a logit


def test_filtered_tokens_do_not_depend_on_what_neighbours_request() -> None:
    """If fewer tokens are kept than requested, filtered ones follow: the same ones in any batch."""
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(3, 3000, torch.device("cpu"), logprobs_mode="processed_logprobs")
    for slot, k in enumerate((6, 90, 1000)):
        sampler.set_slot(SlotUpdate(slot, SamplingParams(top_k=2, logprobs=k), seed=1))
    slots = np.arange(3)
    together = sampler.sample(logits, slots, slots).logprobs
    alone = sampler.sample(logits[:1], slots[:1], slots[:1]).logprobs
    best = logits[0].topk(2).indices.tolist()
    assert alone.token_ids[0, 1:3].tolist() == best
    assert torch.equal(together.token_ids[0, :7], alone.token_ids[0])
    assert alone.logprobs[0, 3:].isneginf().all() and alone.logprobs[0, :3].isfinite().all()


def test_http_answers_have_finite_numbers() -> None:
    """JSON has no infinity: as in vLLM, it becomes -9999."""
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    body = {"model": "tiny", "max_tokens": 2, "temperature": 1, "top_k": 1, "seed": 1}
    message = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    try:
        with served(llm) as server:
            old = ask(server, "/v1/completions", body | {"prompt": PROMPT, "logprobs": 3})
            new = ask(
                server,
                "/v1/chat/completions",
                body | message | {"logprobs": True, "top_logprobs": 3},
            )
    finally:
        llm.shutdown()
    assert old[0] == new[0] == 200
    told = old[2]["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [0.0, 0.0]
    assert sorted(told["top_logprobs"][0].values()) == [-9999.0, -9999.0, 0.0]
    entry = new[2]["choices"][0]["logprobs"]["content"][0]
    assert [each["logprob"] for each in entry["top_logprobs"]] == [0.0, -9999.0, -9999.0]
