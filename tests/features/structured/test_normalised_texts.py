"""Texts that the tokenizer writes in another way than the grammar has them."""

import pytest

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

TEXTS = [
    "e\u0301",
    "xe\u0301y",
    "\u00e9",
    "A\u030a and n\u0303",
    "\u212b",
    "\u1100\u1161",
    "q\u0323\u0307",
]


@pytest.mark.parametrize("temperature", [0, 1])
def test_what_the_tokenizer_would_normalise_can_be_generated_and_ends(temperature: int) -> None:
    """The tokens that are forced there would be those of another text."""
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=100) as llm:
        for text in TEXTS:
            guide = StructuredOutputsParams(choice=[text])
            params = SamplingParams(
                temperature=temperature, max_tokens=40, structured_outputs=guide
            )
            llm.engine.add_request(text, "a", params)
            outputs = []
            for _ in range(100):  # a step that does not end would not get here
                outputs += llm.engine.step()
            output = outputs[-1]
            assert output.finished and output.error is None and output.outputs[0].text == text
