"""In 16 bits another number of rows rounds differently: where tokens differ, they nearly tied."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

import nanoserve
from nanoserve import LLM, SamplingParams
from nanoserve.outputs import RequestOutput

NEAR_TIE = 0.05  # in log-probability
GLOSSARY = Path(nanoserve.__file__).parent / "checkpoint" / "tiny_qwen3" / "glossary.json"


def questions(count: int) -> list[Any]:
    """Some that the model knows the answer to, and some about what it never heard of."""
    words = json.loads(GLOSSARY.read_text(encoding="utf-8"))
    texts = [str(word) for word in words][: count // 2]
    texts += [f"Tell me of {number} green ideas" for number in range(count - len(texts))]
    return [[{"role": "user", "content": f"What is {text}?"}] for text in texts]


def answers(count: int, speculative_config: Any) -> tuple[list[RequestOutput], int]:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=5)
    with LLM("tiny-qwen3", max_num_seqs=8, speculative_config=speculative_config) as llm:
        outputs = llm.chat(questions(count), params, use_tqdm=False)
        num_accepted = getattr(llm.stats, "num_accepted_tokens", 0)
    return outputs, num_accepted


def first_differences(plain: list[RequestOutput], drafted: list[RequestOutput]) -> list[float]:
    """Return, of the answers that differ, by how much the first tokens do that do: what they were
    in log-probability without draft tokens."""
    gaps = []
    for a, b in zip(plain, drafted, strict=True):
        a, b = a.outputs[0], b.outputs[0]
        pairs = zip(a.token_ids, b.token_ids, strict=True)
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if first is not None:  # what follows is another text
            at = a.logprobs[first]
            assert b.token_ids[first] in at, "it was not even among the likely ones"
            gaps.append(at[a.token_ids[first]].logprob - at[b.token_ids[first]].logprob)
    return gaps


@pytest.fixture(scope="module")
def plain(by_size: Callable[..., int]) -> list[RequestOutput]:
    return answers(by_size(12, 100, 200), None)[0]


@pytest.mark.parametrize(
    "method",
    [
        # It drafts what it has seen, which takes more answers than a few.
        pytest.param({"method": "suffix"}, marks=pytest.mark.size("full")),
        pytest.param(
            {"method": "draft_model", "model": "tiny-qwen3-draft"}, marks=pytest.mark.size("full")
        ),
        {"method": "hidden_head", "model": "tiny-qwen3"},
    ],
    ids=lambda method: method["method"],
)
def test_where_tokens_differ_they_nearly_tied(
    method: dict[str, Any], plain: list[RequestOutput]
) -> None:
    count = len(plain)
    drafted, num_accepted = answers(
        count, method | {"adaptive": False, "num_speculative_tokens": 5}
    )
    gaps = first_differences(plain, drafted)
    print(f"{method['method']}: {num_accepted} accepted, {len(gaps)} of {count} answers differ")
    assert max(gaps, default=0) < NEAR_TIE
    assert num_accepted > 5 * count


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_model_that_is_sure_of_nothing_differs_in_near_ties_alone(
    backend: str, tmp_path: Path, by_size: Callable[..., int]
) -> None:
    """Random weights in bfloat16, whose logits are 1/16 or 1/8 apart where they are large."""
    count, rng = by_size(8, 100, 200), random.Random(0)
    make_qwen3(tmp_path, vocab_size=2048, dtype="bfloat16", hidden_size=128, num_hidden_layers=4)
    prompts = [[rng.randrange(2048) for _ in range(20)] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=5)
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "adaptive": False}
    found = []
    for config in (None, drafts):
        options = {"attention_backend": backend, "speculative_config": config}
        with LLM(tmp_path, skip_tokenizer_init=True, max_num_seqs=8, **options) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
            num_drafts = getattr(llm.stats, "num_draft_tokens", 0)
    gaps = first_differences(*found)
    print(f"{backend}: {num_drafts} draft tokens, {len(gaps)} of {count} answers differ, by {gaps}")
    assert num_drafts > 10 * count
    assert max(gaps, default=0) <= 2 / 16 + 1e-3
