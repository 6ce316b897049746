"""The trainer of training/grpo.py: rewards repair a damaged model, and both sides agree."""

import pytest

from training.grpo import train


@pytest.mark.size("full")  # 20 s
def test_rewards_repair_a_model() -> None:
    steps = train(num_steps=10, noise=0.65, seed=0)
    rewards = [step.reward for step in steps]
    assert sum(rewards[-3:]) / 3 > 0.9 > rewards[0] + 0.1
    # Stale weights, or K and V of old ones, would make these a thousand times as large.
    assert max(step.mismatch for step in steps) < 1e-5
    assert max(step.largest_mismatch for step in steps) < 1e-4
