"""A real model, from a GGUF file: its pooled hidden states are those of transformers."""

from typing import Any

import numpy as np
import pytest
from pooling_models import hidden_states, normalized, pooled
from real_texts import TEXTS
from smollm2 import IN_FLOATS, LENGTH, require_smollm2, smollm2_file
from transformers import AutoModelForCausalLM

from nanoserve import LLM, PoolingParams

require_smollm2()
pytestmark = pytest.mark.size("full")

PARIS = "What is the capital of France?"
OTHERS = ["Paris has been the capital of France for centuries.", "Bees make honey from nectar."]


@pytest.fixture(scope="module")
def reference() -> Any:
    file = smollm2_file()
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32"
    ).eval()


def test_real_embeddings_are_those_of_transformers(reference: Any) -> None:
    texts = [text[:600] for text in TEXTS.values()]
    options = LENGTH | IN_FLOATS | {"max_num_batched_tokens": 100}
    with LLM("smollm2", runner="pooling", **options) as llm:
        for kind in ("LAST", "MEAN"):
            params = PoolingParams(pooling_type=kind)
            for output in llm.encode(texts, params, use_tqdm=False):
                expected = pooled(hidden_states(reference, output.prompt_token_ids), kind)
                found = output.outputs.data
                np.testing.assert_allclose(found, normalized(expected), atol=1e-5)
        (near, far) = llm.score(PARIS, OTHERS, use_tqdm=False, pooling_params=params)
    assert near.outputs.score > far.outputs.score
