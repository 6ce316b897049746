"""Acceptance of the bundled head and draft model: accepted draft tokens per step of tiny-qwen3.

    python -m training.acceptance [--questions N]

A draft token is accepted if it is the token that the model itself samples at that position, with
the same noise. So acceptance can be computed from the model's own answers, without speculative
decoding. The last token of an answer, which ends it and which the engine does not return, is not
counted.
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

# Evaluation sets with wordings or sums that are not in the training data; in the last two sets, a
# quarter of the wordings are. Except for sums, the model was trained on all of the answers.
HELD_OUT = (
    "glossary en unseen",
    "glossary zh unseen",
    "addition unseen pairs",
    "unknown unseen topics",
    "multi-turn, 5th turn",
    "after a system message",
)
MAX_DRAFT_TOKENS = 6
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Answer:
    """Answer of the model to a question, with the seed of its noise.

    prompt, tokens: token ids.
    """

    prompt: list[int]
    tokens: list[int]
    seed: int
    temperature: float

    def is_chosen(self, logits: Tensor, first: int) -> Tensor:
        """Return where sampling from `logits` gives the tokens of the answer: bool [num_rows].

        logits: [num_rows, vocab_size], for the positions of the tokens from the `first` on.
        """
        num_rows, vocab_size = logits.shape
        if self.temperature > 0:
            positions = len(self.prompt) + np.arange(first, first + num_rows)
            seeds = np.full(num_rows, self.seed, np.uint64)
            keys = row_keys(seeds, positions, np.zeros(num_rows, np.uint32))
            logits = logits / self.temperature
            Noise(vocab_size, logits.device).subtract_log_exponential(logits, keys)
        return logits.argmax(-1) == torch.tensor(self.tokens[first : first + num_rows])


# Returns bool [num_tokens, MAX_DRAFT_TOKENS]: True if draft token j, proposed after token i of the
# answer, is token i + 1 + j, given that all draft tokens before it are accepted.
Drafter = Callable[[Answer], Tensor]


def head_drafter(head: HiddenHead, target: Qwen3ForCausalLM) -> Drafter:
    """Return the drafter that runs `head` on the hidden states of `target`."""

    @torch.inference_mode()
    def is_drafted(answer: Answer) -> Tensor:
        num_tokens = len(answer.tokens)
        ids = torch.tensor([answer.prompt + answer.tokens])
        # From the hidden state from which the first token was sampled to that of the last one.
        hidden = target.model(ids).last_hidden_state[0, len(answer.prompt) - 1 : -1]
        seen = torch.arange(num_tokens)[:, None] + torch.arange(MAX_DRAFT_TOKENS)
        tokens = torch.tensor(answer.tokens)[seen.clamp(max=num_tokens - 1)]
        logits = target.lm_head(head.unroll(hidden, target.model.embed_tokens(tokens)))
        is_right = torch.zeros(num_tokens, MAX_DRAFT_TOKENS, dtype=torch.bool)
        for j in range(min(MAX_DRAFT_TOKENS, num_tokens - 1)):
            num_rows = num_tokens - 1 - j
            is_right[:num_rows, j] = answer.is_chosen(logits[:num_rows, j], first=1 + j)
        return is_right

    return is_drafted


def draft_model_drafter(draft: Qwen3ForCausalLM) -> Drafter:
    """Return the drafter that runs a draft model.

    A draft model reads tokens only. So its token at a position does not depend on the step in which
    it is proposed, and one pass over the answer is enough.
    """

    @torch.inference_mode()
    def is_drafted(answer: Answer) -> Tensor:
        num_tokens = len(answer.tokens)
        logits = draft(torch.tensor([answer.prompt + answer.tokens])).logits[0]
        is_chosen = answer.is_chosen(logits[len(answer.prompt) : -1], first=1)
        is_right = torch.zeros(num_tokens, MAX_DRAFT_TOKENS, dtype=torch.bool)
        for j in range(min(MAX_DRAFT_TOKENS, num_tokens - 1)):
            is_right[: num_tokens - 1 - j, j] = is_chosen[j:]
        return is_right

    return is_drafted


def accepted_per_step(is_right: list[Tensor], num_draft_tokens: int) -> float:
    """Return the mean number of accepted draft tokens, over all steps with a token left to draft.

    is_right: the result of a `Drafter` for each answer. A step begins where the last one ended:
    after its accepted draft tokens and the bonus token of the model.
    """
    num_steps = num_accepted = 0
    for rights in is_right:
        # Accepted draft tokens, up to the first that is rejected: [num_tokens].
        accepted = rights[:, :num_draft_tokens].long().cumprod(dim=1).sum(dim=1).tolist()
        last = 0
        while last < len(accepted) - 1:
            num_steps += 1
            num_accepted += accepted[last]
            last += accepted[last] + 1
    return num_accepted / num_steps


def held_out_questions(per_set: int) -> list[list[Message]]:
    """Return `per_set` questions of each held-out set.

    All sets have equal weight: otherwise the sums would dominate, at which the head is worst.
    """
    rng = random.Random(0)
    sets = evaluation_sets()
    drawn = [rng.sample(sets[name], per_set) for name in HELD_OUT]
    return [probe.messages for group in drawn for probe in group]


def own_answers(questions: list[list[Message]], temperature: float) -> list[Answer]:
    """Return the bundled model's answers, from nanoserve in float32, each with its own seed."""
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
    """Load a checkpoint with transformers, in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def shipped_drafters() -> dict[str, Drafter]:
    """Return the drafters that ship with tiny-qwen3, by name."""
    target = load_model(bundled_checkpoint("tiny-qwen3"))
    head = HiddenHead.of(read_head(HEAD_PATH), LayerContext())
    return {
        "head": head_drafter(head, target),
        "draft model": draft_model_drafter(load_model(DRAFT_PATH)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Accepted draft tokens per step of tiny-qwen3.")
    parser.add_argument("--questions", type=int, default=80, help="questions of each set, 1 to 100")
    args = parser.parse_args()
    if not 1 <= args.questions <= 100:
        parser.error(f"--questions must be in [1, 100], got {args.questions}")
    torch.set_num_threads(1)
    drafters = shipped_drafters()
    depths = range(1, MAX_DRAFT_TOKENS + 1)
    print("| drafter | temperature |", *(f"k = {depth} |" for depth in depths))
    print("|---" * (2 + len(depths)) + "|")
    for temperature in TEMPERATURES:
        answers = own_answers(held_out_questions(args.questions), temperature)
        for name, is_drafted in drafters.items():
            is_right = [is_drafted(answer) for answer in answers]
            means = (f"{accepted_per_step(is_right, depth):.2f} |" for depth in depths)
            print(f"| {name} | {temperature} |", *means)


if __name__ == "__main__":
    main()
