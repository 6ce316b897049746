"""The recorded run of the chapter on sampling."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

QUESTIONS = [
    "What is a KV cache?",
    "What is a block table?",
    "Explain chunked prefill.",
    "你是谁？",
]


def a_seed_and_its_neighbours(out: Path) -> None:
    """A seeded request alone, then the same one among others in a pool that is too small."""
    seeded = SamplingParams(seed=7, temperature=2.5, top_p=0.98, max_tokens=24)
    other = SamplingParams(temperature=1.0, max_tokens=40)
    options = {"dtype": "float32", "block_size": 8, "num_kv_blocks": 20, "max_num_seqs": 4}
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        prompts = [
            llm.engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question in QUESTIONS
        ]
        llm.generate(prompts[:1], seeded, use_tqdm=False)
        llm.generate([*prompts[1:], prompts[0]], [other, other, other, seeded], use_tqdm=False)
