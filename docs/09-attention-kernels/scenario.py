"""The run of the chapter on attention kernels: the rows that a kernel is launched for."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def attention_rows(out: Path) -> None:
    """Run decode rows with contexts of different lengths, and a chunk after a cached prefix."""
    shared = [
        {"role": "user", "content": "What is a KV cache?"},
        {"role": "assistant", "content": "It keeps the keys and values of all earlier tokens."},
        {"role": "user", "content": "What is PagedAttention?"},
        {"role": "assistant", "content": "It keeps them in blocks that a block table lists."},
    ]
    conversations = {
        "long": [*shared, {"role": "user", "content": "What is FlashAttention?"}],
        "short": [{"role": "user", "content": "Who are you?"}],
        "follows": [*shared, {"role": "user", "content": "What is GQA?"}],
    }
    params = SamplingParams(temperature=0, max_tokens=8)
    options = {"max_num_seqs": 4, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 160}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        engine, tokenizer = llm.engine, llm.engine.tokenizer
        for num_steps, (name, messages) in zip((0, 3, 0), conversations.items(), strict=True):
            text = tokenizer.apply_chat_template(messages)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            engine.add_request(name, prompt, params)
            for _ in range(num_steps):
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
