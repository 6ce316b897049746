"""Embeddings, classes and scores are those of transformers, in float32 within 1e-5."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pooling_models import TYPES, hidden_states, make_prompts, normalized, pooled
from tiny_checkpoints import GEMMA2, GEMMA3, TINY_QWEN3, make_checkpoint, make_qwen3

from nanoserve import LLM, PoolingParams

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "num_kv_blocks": 40,
}
MISTRAL = {"sliding_window": 9, "num_hidden_layers": 3}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen2": {},
    "Llama": {},
    "Mistral": MISTRAL,
    "Gemma2": GEMMA2,
    "Gemma3Text": GEMMA3,
    "Phi3": {"head_dim": 12},
    "Qwen3Moe": MOE,
}


def embed(llm: LLM, prompts: list[list[int]], **params: Any) -> list[np.ndarray]:
    outputs = llm.encode(prompts, PoolingParams(**params), use_tqdm=False)
    return [output.outputs.data.numpy() for output in outputs]


@pytest.mark.small(kind=["LAST", "MEAN"])
@pytest.mark.parametrize("kind", TYPES)
def test_pooled_hidden_states_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    reference, prompts = make_qwen3(tmp_path), make_prompts()
    with LLM(str(tmp_path), runner="pooling", **OPTIONS) as llm:
        plain = embed(llm, prompts, pooling_type=kind, normalize=False)
        scaled = embed(llm, prompts, pooling_type=kind)
        cut = embed(llm, prompts, pooling_type=kind, dimensions=7)
    for prompt, *found in zip(prompts, plain, scaled, cut, strict=True):
        expected = pooled(hidden_states(reference, prompt), kind)
        assert found[0].dtype == np.float32 and found[0].shape == expected.shape
        np.testing.assert_allclose(found[0], expected, atol=1e-5)
        np.testing.assert_allclose(found[1], normalized(expected), atol=1e-5)
        np.testing.assert_allclose(found[2], normalized(expected[..., :7]), atol=1e-5)


@pytest.mark.small(family=["Llama", "Gemma3Text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_base_models_embed_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Their tensors have no prefix, and they have no LM head."""
    settings = FAMILIES[family]
    architecture = getattr(transformers, f"{family}Model")
    reference, prompts = make_checkpoint(architecture, tmp_path, **settings), make_prompts()
    with LLM(str(tmp_path), **OPTIONS) as llm:  # runner="auto" finds that it can only pool
        found = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
        model = llm.engine.executor.model
    for prompt, embedding in zip(prompts, found, strict=True):
        expected = normalized(hidden_states(reference, prompt)[-1])
        np.testing.assert_allclose(embedding, expected, atol=1e-5)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert shapes.count((TINY_QWEN3["vocab_size"], TINY_QWEN3["hidden_size"])) == 1


@pytest.mark.small(family=["Qwen3"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Qwen2", "Mistral"])
def test_classes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    architecture = getattr(transformers, f"{family}ForSequenceClassification")
    reference = make_checkpoint(architecture, tmp_path, num_labels=5)
    reference.config.pad_token_id = None
    prompts = make_prompts()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        probs = [output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)]
        logits = embed(llm, prompts, use_activation=False)
        of_tokens = embed(llm, prompts, task="token_classify", use_activation=False)
    for prompt, *found in zip(prompts, probs, logits, of_tokens, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
            rows = reference.score(torch.from_numpy(hidden_states(reference, prompt))).numpy()
        np.testing.assert_allclose(found[0], expected.softmax(-1), atol=1e-5)
        np.testing.assert_allclose(found[1], expected, atol=1e-5)
        np.testing.assert_allclose(found[2], rows, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, torch.nn.Identity()),
    ],
)
def test_probabilities_are_of_the_kind_that_the_checkpoint_says(
    settings: dict[str, Any], activation: Any, tmp_path: Path
) -> None:
    architecture = transformers.Qwen3ForSequenceClassification
    reference = make_checkpoint(architecture, tmp_path, **settings)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        (output,) = llm.classify([1, 2, 3], use_tqdm=False)
    with torch.no_grad():
        expected = activation(reference(torch.tensor([[1, 2, 3]])).logits[0])
    assert output.outputs.num_classes == settings["num_labels"]
    np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_of_the_lm_head_are_a_classifier(is_tied: bool, tmp_path: Path) -> None:
    """As vLLM's `classifier_from_token`; two tokens are the probability of the second one."""
    reference, prompts = make_qwen3(tmp_path, tie_word_embeddings=is_tied), make_prompts()
    tokens = [17, 3, 250]
    for chosen in (tokens, tokens[:2]):
        overrides = {"classifier_from_token": chosen}
        with LLM(str(tmp_path), runner="pooling", hf_overrides=overrides, **OPTIONS) as llm:
            found = [output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)]
        for prompt, probs in zip(prompts, found, strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([prompt])).logits[0, -1, chosen]
            expected = logits.softmax(-1)
            np.testing.assert_allclose(probs, expected[-len(probs) :], atol=1e-5)
            assert len(probs) == (3 if len(chosen) == 3 else 1)


def test_a_score_is_the_cosine_of_two_embeddings(tmp_path: Path) -> None:
    reference, (query, *documents) = make_qwen3(tmp_path), make_prompts()
    with LLM(str(tmp_path), runner="pooling", **OPTIONS) as llm:
        one = llm.score(query, documents, use_tqdm=False)
        each = llm.score(documents, documents[::-1], use_tqdm=False)
        steps = llm.stats.num_computed_tokens
        llm.reset_prefix_cache()
        llm.score(query, documents, use_tqdm=False)
        lengths = sum(map(len, [query, *documents]))
        assert llm.stats.num_computed_tokens - steps <= lengths  # the query is computed once
    vectors = {tuple(p): normalized(hidden_states(reference, p)[-1]) for p in [query, *documents]}
    for output, document in zip(one, documents, strict=True):
        expected = vectors[tuple(query)] @ vectors[tuple(document)]
        assert abs(output.outputs.score - expected) < 1e-5
        assert output.prompt_token_ids == query + document
    for output, a, b in zip(each, documents, documents[::-1], strict=True):
        assert abs(output.outputs.score - vectors[tuple(a)] @ vectors[tuple(b)]) < 1e-5


def test_sixteen_bits_are_pooled_in_float32(tmp_path: Path) -> None:
    """A mean over bfloat16 states is exact to float32; its states are the model's."""
    make_qwen3(tmp_path, dtype="bfloat16")
    prompt = make_prompts()[-1]
    with LLM(str(tmp_path), runner="pooling", **OPTIONS) as llm:
        (rows,) = embed(llm, [prompt], pooling_type="ALL", normalize=False)
        (mean,) = embed(llm, [prompt], pooling_type="MEAN", normalize=False)
    assert np.array_equal(rows, torch.from_numpy(rows).bfloat16().float().numpy())
    np.testing.assert_allclose(mean, rows.astype(np.float64).mean(0), rtol=1e-6, atol=1e-7)
