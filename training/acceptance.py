"""How many guesses at its next tokens does the bundled model accept, per step, and from whom?

    python -m training.acceptance [--questions N]

A guess is accepted if it is the token that the model itself samples at that position, with the same
noise; so the model's own answers tell, without a step of speculation. An answer's last token, which
ends it and which the engine does not give, is not counted.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.features.speculative.hidden_head import HiddenHead, read_head
from nanoserve.models.layers.context import LayerContext
from nanoserve.sampling.gumbel_noise import Noise, row_keys
from training.corpus import Message, evaluation_sets
from training.evaluate import MAX_ANSWER_TOKENS
from training.train_draft import DRAFT_PATH
from training.train_head import HEAD_PATH

# Of the evaluation sets those whose wordings or sums were never trained on; of the last two this is
# true of three questions in four. The answers were, but for the sums: the model knows no others.
HELD_OUT = (
    "glossary en unseen",
    "glossary zh unseen",
    "addition unseen pairs",
    "unknown unseen topics",
    "multi-turn, 5th turn",
    "after a system message",
)
MAX_GUESSES = 6
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Answer:
    """What the model said to a question, and with which noise."""

    prompt: list[int]
    tokens: list[int]
    seed: int
    temperature: float

    def is_chosen(self, logits: Tensor, first: int) -> Tensor:
        """Whether logits [num_rows, vocab_size] choose the tokens from the `first` on."""
        num_rows, vocab_size = logits.shape
        if self.temperature > 0:
            positions = len(self.prompt) + np.arange(first, first + num_rows)
            seeds = np.full(num_rows, self.seed, np.uint64)
            keys = row_keys(seeds, positions, np.zeros(num_rows, np.uint32))
            logits = logits / self.temperature
            Noise(vocab_size, logits.device).subtract_log_exponential(logits, keys)
        return logits.argmax(-1) == torch.tensor(self.tokens[first : first + num_rows])


# [num_tokens, MAX_GUESSES]: whether guess j, made when token i of the answer has just been chosen,
# is token i + 1 + j, if all guesses before it are right.
Guesser = Callable[[Answer], Tensor]


def head_guesser(head: HiddenHead, target: Qwen3ForCausalLM) -> Guesser:
    @torch.inference_mode()
    def guess(answer: Answer) -> Tensor:
        num_tokens = len(answer.tokens)
        ids = torch.tensor([answer.prompt + answer.tokens])
        # From the hidden state that gave the first token to the one that gave the last.
        hidden = target.model(ids).last_hidden_state[0, len(answer.prompt) - 1 : -1]
        seen = torch.arange(num_tokens)[:, None] + torch.arange(MAX_GUESSES)
        tokens = torch.tensor(answer.tokens)[seen.clamp(max=num_tokens - 1)]
        logits = target.lm_head(head.unroll(hidden, target.model.embed_tokens(tokens)))
        is_right = torch.zeros(num_tokens, MAX_GUESSES, dtype=torch.bool)
        for j in range(min(MAX_GUESSES, num_tokens - 1)):
            num_rows = num_tokens - 1 - j
            is_right[:num_rows, j] = answer.is_chosen(logits[:num_rows, j], first=1 + j)
        return is_right

    return guess


def draft_guesser(draft: Qwen3ForCausalLM) -> Guesser:
    """A draft model sees the tokens alone: behind the same tokens, its guess is always the same."""

    @torch.inference_mode()
    def guess(answer: Answer) -> Tensor:
        num_tokens = len(answer.tokens)
        logits = draft(torch.tensor([answer.prompt + answer.tokens])).logits[0]
        is_chosen = answer.is_chosen(logits[len(answer.prompt) : -1], first=1)
        is_right = torch.zeros(num_tokens, MAX_GUESSES, dtype=torch.bool)
        for j in range(min(MAX_GUESSES, num_tokens - 1)):
            is_right[: num_tokens - 1 - j, j] = is_chosen[j:]
        return is_right

    return guess


def accepted_per_step(is_right: list[Tensor], num_guesses: int) -> float:
    """Mean number of accepted guesses, over all steps in which there was something to guess.

    is_right: of each answer, as a `Guesser` tells. A step begins where the last one ended: behind
    the accepted guesses and the one token that the model itself adds.
    """
    num_steps = num_accepted = 0
    for rights in is_right:
        # Right without a gap, of those asked for: [num_tokens].
        accepted = rights[:, :num_guesses].long().cumprod(dim=1).sum(dim=1).tolist()
        last = 0
        while last < len(accepted) - 1:
            num_steps += 1
            num_accepted += accepted[last]
            last += accepted[last] + 1
    return num_accepted / num_steps


def held_out_questions(per_set: int) -> list[list[Message]]:
    """Some questions of each held-out set, all sets alike: of the sums there are the most, and the
    head is worst at them."""
    rng = random.Random(0)
    sets = evaluation_sets()
    drawn = [rng.sample(sets[name], per_set) for name in HELD_OUT]
    return [probe.messages for group in drawn for probe in group]


def own_answers(questions: list[list[Message]], temperature: float) -> list[Answer]:
    """The bundled model's, from nanoserve in float32; each question has a seed of its own."""
    from nanoserve import LLM, SamplingParams

    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_ANSWER_TOKENS)
        for seed in range(len(questions))
    ]
    with LLM("tiny-qwen3", device="cpu", dtype="float32") as llm:
        outputs = llm.chat(questions, params, use_tqdm=False)
    return [
        Answer(output.prompt_token_ids, output.outputs[0].token_ids, seed, temperature)
        for seed, output in enumerate(outputs)
    ]


def load_model(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def shipped_guessers() -> dict[str, Guesser]:
    target = load_model(bundled_checkpoint("tiny-qwen3"))
    head = HiddenHead.of(read_head(HEAD_PATH), LayerContext())
    return {
        "head": head_guesser(head, target),
        "draft model": draft_guesser(load_model(DRAFT_PATH)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Accepted guesses per step, for tiny-qwen3.")
    parser.add_argument("--questions", type=int, default=80, help="how many of each set")
    args = parser.parse_args()
    if not 1 <= args.questions <= 100:
        parser.error(f"--questions must be in [1, 100], got {args.questions}")
    torch.set_num_threads(1)
    guessers = shipped_guessers()
    depths = range(1, MAX_GUESSES + 1)
    print("| guesser | temperature |", *(f"k = {depth} |" for depth in depths))
    print("|---" * (2 + len(depths)) + "|")
    for temperature in TEMPERATURES:
        answers = own_answers(held_out_questions(args.questions), temperature)
        for name, guess in guessers.items():
            is_right = [guess(answer) for answer in answers]
            means = (f"{accepted_per_step(is_right, depth):.2f} |" for depth in depths)
            print(f"| {name} | {temperature} |", *means)


if __name__ == "__main__":
    main()
