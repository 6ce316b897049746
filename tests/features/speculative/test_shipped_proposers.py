"""The head and the draft model that ship with tiny-qwen3: how often they draft what it says.

Thresholds are a little below what `python -m training.acceptance` shows. Weights that
have gone astray are not a little below them.
"""

from collections.abc import Callable

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from training.acceptance import (
    accepted_per_step,
    draft_model_drafter,
    held_out_questions,
    load_model,
    own_answers,
    shipped_drafters,
)
from training.train_draft import DRAFT_PATH
from training.train_head import HEAD_PATH

NUM_DRAFTS = 4
MOST_BYTES = 1 << 20  # of either file: a package carries them


@pytest.fixture(scope="module")
def proposers():
    return shipped_drafters()


@pytest.mark.small(temperature=[1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_they_draft_what_it_says(
    proposers, by_size: Callable[..., int], temperature: float
) -> None:
    questions = held_out_questions(per_set=by_size(3, 20, 60))
    answers = own_answers(questions, temperature)
    accepted = {
        name: accepted_per_step([is_drafted(answer) for answer in answers], NUM_DRAFTS)
        for name, is_drafted in proposers.items()
    }
    print(temperature, accepted)
    assert all(mean > 3.2 for mean in accepted.values()), accepted


def test_a_step_begins_where_the_last_one_ended() -> None:
    is_right = torch.tensor([[True, True], [False, True], [True, False], [True, True]])
    # Tokens 1 and 2 are accepted behind token 0, and 3 comes with them: nothing is left.
    assert accepted_per_step([is_right], 2) == 2
    # With one draft token: token 1 behind 0, then 2 from the model; 3 behind 2.
    assert accepted_per_step([is_right], 1) == 1
    # Nothing behind a rejected one counts: token 1 from the model, then 2, then 3.
    assert accepted_per_step([torch.tensor([[False, True]] * 4)], 2) == 0


def test_the_model_itself_would_draft_every_token() -> None:
    """So noise and positions are those with which the engine has sampled."""
    is_drafted = draft_model_drafter(load_model(bundled_checkpoint("tiny-qwen3")))
    for answer in own_answers(held_out_questions(per_set=1), temperature=1.0):
        assert is_drafted(answer)[:-1, 0].all()


def test_the_draft_model_is_a_checkpoint() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(DRAFT_PATH, tokenizer="tiny-qwen3", device="cpu") as llm:
        message = [{"role": "user", "content": "What is a KV cache?"}]
        assert len(llm.chat(message, params, use_tqdm=False)[0].outputs[0].text) > 20


def test_they_are_small() -> None:
    for path in (HEAD_PATH, DRAFT_PATH / "model.safetensors"):
        assert path.stat().st_size < MOST_BYTES
