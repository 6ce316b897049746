"""The recorded run of the chapter on the life of a request."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

QUESTIONS = {
    "first": "What is a KV cache?",
    "second": "What is continuous batching?",
    "third": "Define the block manager, please.",
    "aborted": "Explain chunked prefill.",
}


def one_life_with_a_preemption(out: Path) -> None:
    """Chunked prompts, a pool that is too small, and an abort."""
    options = {"dtype": "float32", "block_size": 8, "num_kv_blocks": 18}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        engine = llm.engine
        for name, question in QUESTIONS.items():
            message = {"role": "user", "content": question}
            prompt = engine.tokenizer.apply_chat_template([message])
            engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=48))
        while engine.has_unfinished_requests():
            engine.step()
            if engine.stats.num_steps == 12:
                engine.abort_request("aborted")
