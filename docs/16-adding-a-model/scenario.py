"""The trace of the chapter on adding a model: what the engine knows about a model."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def any_model(out: Path) -> None:
    """A question and its answer, and the question again: nothing here depends on the model."""
    question = [{"role": "user", "content": "What is GQA?"}]
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), num_kv_blocks=16, max_model_len=96
    ) as llm:
        llm.chat(question, params, use_tqdm=False)
        llm.chat(question, params, use_tqdm=False)
