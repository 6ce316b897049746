"""Repair a damaged model by rewards alone: GRPO on sums of two numbers, in minutes on two cores.

    python -m training.grpo [--steps N] [--noise SIGMA] [--seed N]

The bundled model knows its sums. Gaussian noise on all projections makes most answers wrong; then
it learns them again from nothing but "this answer is right". A step has four parts:

1. nanoserve samples several answers to each question (the rollouts), with log-probabilities;
2. an answer's reward is 1 if its last number is the sum, else 0, and its advantage is how much
   better that is than the other answers to the same question (GRPO: Shao et al. 2024,
   arXiv 2402.03300);
3. transformers, the trainer, computes the log-probabilities of the same tokens, and makes tokens of
   good answers more likely (the clipped ratio of PPO: Schulman et al. 2017);
4. `LLM.update_weights` gives the trainer's weights to the engine.

Each step reports how far the log-probabilities of engine and trainer differ. Both are float32 and
have the same weights, so the mean stays near 2e-6, which is how far either is from float64; stale
weights or a stale prefix cache show there first.
"""

import argparse
import re
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint

QUESTIONS = 12  # per step
SAMPLES = 8  # answers to each question: what an answer is compared with
MAX_TOKENS = 12
CLIP = 0.2  # how far a step moves a token's probability: to 0.8 or 1.2 times as much
PAD = 0


class Rollout(NamedTuple):
    """An answer of the engine to a question."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # of `token_ids`, as the engine computed them
    reward: float


@dataclass
class Step:
    """What a step reports."""

    number: int
    reward: float  # the share of right answers, before the step's update
    mismatch: float  # mean |log-probability of the trainer - that of the engine| of a token
    largest_mismatch: float
    seconds: float


def damage(model: nn.Module, noise: float, generator: torch.Generator) -> None:
    """Add Gaussian noise to all projections, `noise` times as strong as a projection's values."""
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator)


def sample(llm: LLM, generator: torch.Generator, seed: int) -> list[list[Rollout]]:
    """Return the rollouts of a step: `SAMPLES` answers to each of `QUESTIONS` sums."""
    sums = torch.randint(10, 50, (QUESTIONS, 2), generator=generator).tolist()
    conversations = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums]
    params = SamplingParams(temperature=1, n=SAMPLES, max_tokens=MAX_TOKENS, logprobs=0, seed=seed)
    outputs = llm.chat(conversations, params, use_tqdm=False)
    groups: list[list[Rollout]] = []
    for (a, b), output in zip(sums, outputs, strict=True):
        groups.append([])
        for answer in output.outputs:
            logprobs = [
                entry[token].logprob
                for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
            numbers = re.findall(r"\d+", answer.text)
            reward = float(bool(numbers) and int(numbers[-1]) == a + b)
            groups[-1].append(Rollout(output.prompt_token_ids, answer.token_ids, logprobs, reward))
    return groups


def token_logprobs(model: nn.Module, rollouts: list[Rollout]) -> Tensor:
    """Return the model's log-probabilities of all answers' tokens: [num_tokens], with gradients."""
    rows = [torch.tensor(r.prompt_ids + r.token_ids) for r in rollouts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    # Padding follows the tokens, so that causal attention needs no mask for it.
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    answers = [
        row[len(r.prompt_ids) - 1 : len(r.prompt_ids) - 1 + len(r.token_ids)]
        for row, r in zip(chosen, rollouts, strict=True)
    ]
    return torch.cat(answers)


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[Rollout]]
) -> Tensor:
    """Make one step of the optimizer; return the mismatch of each token's log-probability."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups])
    spread = rewards.std(dim=1, keepdim=True) + 1e-4  # answers of equal reward teach nothing
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten()
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    advantage = advantages.repeat_interleave(lengths)
    engine = torch.tensor([x for rollout in rollouts for x in rollout.logprobs])

    trainer = token_logprobs(model, rollouts)
    ratio = (trainer - engine).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (trainer.detach() - engine).abs()


def train(num_steps: int, noise: float, seed: int, learning_rate: float = 2e-4) -> list[Step]:
    """Damage the bundled model, and train it for `num_steps`; return what each step reports."""
    folder = bundled_checkpoint("tiny-qwen3")
    generator = torch.Generator().manual_seed(seed)
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    damage(trainer, noise, generator)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=learning_rate, weight_decay=0.0)
    steps = []
    with LLM("tiny-qwen3", dtype="float32", max_model_len=128, kv_cache_memory_bytes=2**26) as llm:
        for number in range(num_steps):
            start = time.perf_counter()
            llm.update_weights(trainer, version=number)
            groups = sample(llm, generator, seed=seed * num_steps + number)
            reward = sum(r.reward for group in groups for r in group) / (QUESTIONS * SAMPLES)
            mismatch = learn(trainer, optimizer, groups)
            mean, largest = float(mismatch.mean()), float(mismatch.max())
            steps.append(Step(number, reward, mean, largest, time.perf_counter() - start))
            print(
                f"step {number:3}: reward {reward:.2f}, mismatch {mean:.1e}, at most {largest:.1e}"
            )
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--noise", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(args.steps, args.noise, args.seed)


if __name__ == "__main__":
    main()
