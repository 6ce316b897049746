"""Trace of the chapter on speculative decoding: draft tokens looked up in the conversation."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

QUESTION = "What is a KV cache?"
# An earlier answer to it, with one word that differs from the one that the model will say.
ANSWER = (
    "The KV cache keeps the keys and values of all earlier tokens in each layer, so that a new "
    "token computes only its own; LLaMA-7B in FP16 needs 0.5 MiB per token."
)


def guesses_from_the_conversation(out: Path) -> None:
    """Two conversations: one repeats a question that was answered before, the other does not."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    options = {"dtype": "float32", "num_kv_blocks": 24, "speculative_config": speculation}
    history = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    chats = [
        [*history, {"role": "user", "content": QUESTION}],
        [{"role": "user", "content": "What is continuous batching?"}],
    ]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 16)]
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        llm.chat(chats, params, use_tqdm=False)
