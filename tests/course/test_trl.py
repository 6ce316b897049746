"""TRL's GRPOTrainer with rollouts of nanoserve: both compute the same log-probabilities."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.outputs import CompletionOutput
from training.grpo import damage
from training.trl_rollouts import EndAt, NanoserveRollouts, check_supported, sampling_params

FOLDER = bundled_checkpoint("tiny-qwen3")


def engine(**options: Any) -> LLM:
    """A small float32 engine, as a trainer needs it."""
    sizes = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 2**25}
    return LLM(FOLDER, logprobs_mode="processed_logprobs", **sizes, **options)


# ---------------------------------------------------------------- without TRL


def logprobs_of(answer: CompletionOutput) -> list[float]:
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in pairs]


def test_an_output_keeps_the_token_that_ends_it() -> None:
    sums = [[{"role": "user", "content": f"What is {a} + 7?"}] for a in (3, 14)]
    options = {"n": 4, "temperature": 1.2, "max_tokens": 10, "seed": 1, "logprobs": 0}
    with engine() as llm:
        eos_token_ids = llm.engine.input_processor.eos_token_ids
        plain = llm.chat(sums, SamplingParams(**options), use_tqdm=False)
        llm.engine.add_extension(EndAt())
        again = llm.chat(sums, SamplingParams(**options), use_tqdm=False)
        options |= {"ignore_eos": True, "extra_args": {"end_at": list(eos_token_ids)}}
        kept = llm.chat(sums, SamplingParams(**options), use_tqdm=False)
    reasons = set()
    for outputs in zip(plain, again, kept, strict=True):
        for before, same, after in zip(*(output.outputs for output in outputs), strict=True):
            assert same.token_ids == before.token_ids  # requests without `end_at` are as ever
            num_tokens, reason = len(before.token_ids), before.finish_reason
            assert after.token_ids[:num_tokens] == before.token_ids
            ended = [token in eos_token_ids for token in after.token_ids[num_tokens:]]
            assert ended == [True] * (reason == "stop")
            assert after.finish_reason == reason
            assert logprobs_of(after)[:num_tokens] == pytest.approx(logprobs_of(before), abs=1e-5)
            reasons.add(after.finish_reason)
    assert reasons == {"stop", "length"}


def arguments(**values: Any) -> SimpleNamespace:
    """A trainer's sampling options: `GRPOConfig`'s defaults, but for `values`."""
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    args |= {"max_completion_length": 16, "generation_kwargs": None, **values}
    return SimpleNamespace(args=SimpleNamespace(**args), eos_token_ids=[2])


def test_a_trainers_options_are_used_or_rejected() -> None:
    given = {"stop_token_ids": [5], "logit_bias": {3: 1.0}, "top_k": 4}
    params = sampling_params(arguments(generation_kwargs=given, top_k=9), n=2, seed=3)
    assert (params.top_k, params.logit_bias, params.max_tokens, params.n) == (4, {3: 1.0}, 16, 2)
    assert params.extra_args == {"end_at": [2, 5]} and params.stop_token_ids is None
    assert given["stop_token_ids"] == [5]
    with pytest.raises(ValueError, match=r"NanoserveRollouts sets \['min_tokens', 'n'\]"):
        sampling_params(arguments(generation_kwargs={"n": 3, "min_tokens": 2}), n=1, seed=0)
    with pytest.raises(ValueError, match="beam_width"):
        sampling_params(arguments(generation_kwargs={"beam_width": 3}), n=1, seed=0)
    config = SimpleNamespace(logprobs_mode="raw_logprobs")
    with pytest.raises(ValueError, match="pass logprobs_mode='processed_logprobs' to LLM"):
        NanoserveRollouts(SimpleNamespace(engine=SimpleNamespace(config=config)))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("tools", [print], "tools"),
        ("is_fsdp_enabled", True, "FSDP"),
        ("is_deepspeed_enabled", True, "DeepSpeed"),
        ("model", SimpleNamespace(peft_config={"default": None}), "PEFT"),
        ("processing_class", object(), "images"),
    ],
)
def test_what_would_be_wrong_is_rejected(attribute: str, value: Any, message: str) -> None:
    from transformers import AutoTokenizer

    trainer = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
        tools=[],
        is_fsdp_enabled=False,
        is_deepspeed_enabled=False,
    )
    check_supported(trainer)
    setattr(trainer, attribute, value)
    with pytest.raises(ValueError, match=message):
        check_supported(trainer)


# ---------------------------------------------------------------- with TRL


class Sums:
    """A reward function, 1 for a right sum, that keeps what it has seen."""

    __name__ = "sums"

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float]] = []  # question, answer, reward

    def __call__(self, prompts: Any, completions: Any, total: list[int], **_: Any) -> list[float]:
        rewards = []
        for prompt, completion, expected in zip(prompts, completions, total, strict=True):
            answer = completion[0]["content"]
            rewards.append(float(re.findall(r"\d+", answer)[-1:] == [str(expected)]))
            self.seen.append((prompt[0]["content"], answer, rewards[-1]))
        return rewards


def trainer_of(rollouts: NanoserveRollouts, reward: Sums, folder: Path, num_steps: int) -> Any:
    """A `GRPOTrainer` of the damaged bundled model: 4 sums and 8 answers to each in a step."""
    trl = pytest.importorskip("trl", reason="pip install trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    damage(model, 0.65, generator)
    sums = torch.randint(10, 50, (64, 2), generator=generator).tolist()
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "total": a + b}
        for a, b in sums
    ]
    args = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=12,
        temperature=0.9,
        max_steps=num_steps,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return trl.GRPOTrainer(
        model,
        reward,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
        rollout_func=rollouts,
    )


@pytest.fixture(autouse=True)
def no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.mark.size("full")  # 20 s, and TRL is imported
def test_grpo_steps_of_trl(tmp_path: Path) -> None:
    reward = Sums()
    with engine() as llm:
        rollouts = NanoserveRollouts(llm)
        trainer = trainer_of(rollouts, reward, tmp_path, num_steps=4)
        rollouts.enable_correction(trainer)
        before = {name: w.clone() for name, w in trainer.model.state_dict().items()}
        trainer.train()
        assert llm.weights_version == 3  # the last step's rollouts, of the weights before it
        batch = rollouts([[{"role": "user", "content": "What is 20 + 22?"}]] * 2, trainer)
        assert llm.weights_version == 4
    steps = trainer.state.log_history[:4]
    # As in test_grpo.py. These were 4e-5 and 8e-7.
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-4
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 1e-5
    for step in steps:
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert all(step["grad_norm"] > 0 for step in steps)
    after = trainer.model.state_dict()
    assert any((before[name] - after[name]).abs().max() > 1e-4 for name in before)

    # Each question has 8 answers, which are not all the same, and a right answer has its reward.
    assert len(reward.seen) == 4 * 32
    for first in range(0, len(reward.seen), 8):
        assert len({question for question, _, _ in reward.seen[first : first + 8]}) == 1
    for question, answer, given in reward.seen:
        total = sum(int(number) for number in re.findall(r"\d+", question))
        assert given == float(re.findall(r"\d+", answer)[-1:] == [str(total)])
    for number, step in enumerate(steps):
        given = [entry[2] for entry in reward.seen[32 * number : 32 * (number + 1)]]
        assert step["reward"] == pytest.approx(sum(given) / 32)
        assert step["completions/clipped_ratio"] < 1  # some end with EOS
    assert {entry[2] for entry in reward.seen} == {0.0, 1.0}
    assert batch["prompt_ids"][0] == batch["prompt_ids"][1]


@pytest.mark.size("full")  # 7 s
def test_stale_weights_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference that the test above bounds is large if the engine misses a step."""
    with engine() as llm:
        rollouts = NanoserveRollouts(llm)
        trainer = trainer_of(rollouts, Sums(), tmp_path, num_steps=3)
        rollouts.enable_correction(trainer)
        update = llm.update_weights
        monkeypatch.setattr(
            llm, "update_weights", lambda model, version: version or update(model, version=0)
        )
        trainer.train()
    differences = [
        step["sampling/sampling_logp_difference/max"] for step in trainer.state.log_history[:3]
    ]
    assert differences[0] < 1e-4 and min(differences[1:]) > 1e-3


@pytest.mark.size("full")  # 7 s
def test_without_the_correction(tmp_path: Path) -> None:
    with engine() as llm:
        rollouts = NanoserveRollouts(llm)
        trainer = trainer_of(rollouts, Sums(), tmp_path, num_steps=2)
        with pytest.raises(ValueError, match="pass rollout_func=rollouts"):
            NanoserveRollouts(llm).enable_correction(trainer)
        trainer.train()
        assert llm.weights_version == 1
    assert not any(name.startswith("sampling/") for name in trainer.state.log_history[0])
