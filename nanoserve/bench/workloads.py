"""What engines and servers are measured with: how many requests, how long, and what they share."""

from random import Random
from typing import Any

Tokens = list[list[int]]
WORKLOADS: dict[str, dict[str, Any]] = {
    "random": {"num_seqs": 64, "input_len": "16-256", "output_len": "16-128"},
    "nano-vllm": {"num_seqs": 256, "input_len": "100-1024", "output_len": "100-1024"}
    | {"shape": "qwen3-0.6b", "temperature": 0.6},
    "shared-prefix": {"num_seqs": 64, "input_len": "32-32", "output_len": "32-32"}
    | {"shared_len": 512},
    "long-prompt": {"num_seqs": 16, "input_len": "1024-1536", "output_len": "16-32"},
    "chat": {"num_seqs": 64, "input_len": "16-64", "output_len": "16-128"}
    | {"shared_len": 64, "turns": 4},
    "single": {"num_seqs": 1, "input_len": "128-128", "output_len": "256-256"},
}


def draw_workload(
    num_seqs: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocab_size: int,
    shared_len: int = 0,
    turns: int = 1,
) -> tuple[Tokens, list[int]]:
    """All prompts, then all output lengths, from one generator: nano-vllm's, draw for draw.

    A small vocabulary wraps ids only after they are drawn, so lengths are the same for all models.
    All prompts begin with the same `shared_len` tokens. With `turns`, a prompt repeats that of its
    conversation's turn before, and made-up tokens as its answer, before it says something new.
    """
    rng = Random(0)

    def draw(num_tokens: int) -> list[int]:
        return [rng.randint(0, 10_000) % vocab_size for _ in range(num_tokens)]

    messages = [draw(rng.randint(*input_len)) for _ in range(num_seqs)]
    output_lens = [rng.randint(*output_len) for _ in range(num_seqs)]
    shared, prompts, num_conversations = draw(shared_len), [], max(1, num_seqs // turns)
    for message in messages:
        before = len(prompts) - num_conversations
        history = shared if before < 0 else prompts[before] + draw(output_lens[before])
        prompts.append(history + message)
    return prompts, output_lens


def length_range(text: str) -> tuple[int, int]:
    low, high = map(int, text.split("-"))
    if not 1 <= low <= high:
        raise ValueError(text)
    return low, high


def counts(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def rates(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def milliseconds(text: str) -> float:
    return float(text) / 1000
