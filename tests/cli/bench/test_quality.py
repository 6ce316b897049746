"""benchmarks/quality.py: which schemes it asks, and how far distributions are apart."""

import math
from itertools import product

import numpy as np
import pytest
import quality_real
from divergence import divergence
from prompt_logits import prompt_logits
from quality import SCHEMES

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig


def test_every_width_of_weights_is_asked_with_every_cache() -> None:
    asked = {
        (s.get("quantization"), s.get("quantization_group_size"), s.get("kv_cache_dtype", "auto"))
        for s in SCHEMES.values()
    }
    weights = [(None, None), ("int8", None), *(("int4", size) for size in (32, 64, 128))]
    pairs = product(weights, ("auto", "int8", "fp8"))
    assert {(*weight, cache) for weight, cache in pairs} == asked
    for scheme in SCHEMES.values():
        EngineConfig("none", **{name: value for name, value in scheme.items() if name != "gguf"})


def test_every_scheme_of_a_real_model_is_one_of_options_that_exist() -> None:
    for scheme in quality_real.SCHEMES.values():
        EngineConfig("none", **scheme)


def test_a_real_model_is_looked_for(tmp_path) -> None:
    assert quality_real.model_file(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="'no-such-model' is neither a file nor a folder"):
        quality_real.model_file("no-such-model")


def test_the_divergence_is_kullbacks_and_leiblers() -> None:
    p, q = np.log([[0.75, 0.25], [0.5, 0.5]]), np.log([[0.5, 0.5], [0.5, 0.5]])
    p, q = (x.astype(np.float32) + 3 for x in (p, q))  # logits: a constant changes nothing
    same = divergence(p, p, [0, 1])
    assert same.kl_mean == same.mean == same.largest == same.log_perplexity == 0
    found = divergence(p, q, [0, 1])
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert found.kl_mean == pytest.approx(kl / 2, rel=1e-5)
    assert found.largest == pytest.approx(math.log(1.5), rel=1e-5)
    assert found.mean == found.log_perplexity == pytest.approx(math.log(1.5) / 2, rel=1e-5)
    assert found.perplexity == pytest.approx(2, rel=1e-5)
    assert found.same_choice == 1
    assert divergence(p, q[:, ::-1].copy() - p, [0, 1]).same_choice == 0.5
    with pytest.raises(ValueError, match="cannot be compared"):
        divergence(p, q[:1], [0])


@pytest.mark.parametrize("budget", [16, 512])
def test_all_logits_are_those_of_the_log_probabilities(checkpoint, budget: int) -> None:
    prompts = [[3 * i % 50 for i in range(30)], [3 * i % 50 for i in range(20)], [7, 8]]
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 4}
    with LLM(checkpoint, max_num_batched_tokens=budget, **options) as llm:
        logits = prompt_logits(llm, prompts)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    largest = logits.max(axis=1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    expected = [
        found[token_id].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for token_id, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    next_ids = [token_id for prompt in prompts for token_id in prompt[1:]]
    assert logits[:, 0].size == len(next_ids) == 49
    np.testing.assert_allclose(logprobs[range(49), next_ids], expected, atol=1e-5)
