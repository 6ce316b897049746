"""Rollouts of nanoserve for TRL's `GRPOTrainer`: a `rollout_func` that needs no vLLM.

    llm = LLM(folder, logprobs_mode="processed_logprobs")
    rollouts = NanoserveRollouts(llm)
    trainer = GRPOTrainer(model, reward, args, train_dataset=data, rollout_func=rollouts)
    trainer.train()

TRL calls a `rollout_func` with the prompts of a generation batch and the trainer. It expects token
ids of prompts and completions, EOS included, and the log-probability with which each token was
sampled. Written for TRL 1.16, where `rollout_func` is experimental.
"""

import random
from collections.abc import Sequence as AbstractSequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from nanoserve import LLM, SamplingParams
from nanoserve.engine.extension import Extension
from nanoserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from trl import GRPOTrainer

Prompt = str | list[dict[str, Any]]
# Sampling parameters that `generation_kwargs` cannot set.
RESERVED = {"n", "seed", "logprobs", "ignore_eos", "min_tokens", "detokenize", "extra_args"}


class EndAt(Extension):
    """Ends an output at a token in `extra_args["end_at"]`, and keeps that token.

    A trainer needs EOS and its log-probability, because EOS was sampled like any other token. The
    engine's own EOS is not a part of the output. A stop condition sees tokens that are.
    """

    def on_add(self, seq: Sequence) -> None:
        end_at = frozenset((seq.params.extra_args or {}).get("end_at", ()))

        def end(seq: Sequence) -> tuple[str, None] | None:
            return ("stop", None) if seq.token_ids[-1] in end_at else None

        if end_at:
            for completion in (seq, *seq.siblings):
                completion.stop_conditions.append(end)


class NanoserveRollouts:
    """A `rollout_func` that samples with `llm`, whose weights follow those of the trainer.

    llm: has the trainer's model, with `logprobs_mode="processed_logprobs"`. With several processes
        (not tested), each has its own `LLM`.

    Temperature, filters, `repetition_penalty`, `max_completion_length` and `generation_kwargs` are
    those of `GRPOConfig`. Noise is seeded by its `seed`. Raises `ValueError`, before anything is
    sampled, for what is not supported: PEFT, FSDP and DeepSpeed, images, and tools.
    """

    def __init__(self, llm: LLM) -> None:
        mode = llm.engine.config.logprobs_mode
        if mode != "processed_logprobs":
            raise ValueError(
                f"logprobs_mode={mode!r}: the trainer needs log-probabilities of the distribution "
                f"that tokens are sampled from; pass logprobs_mode='processed_logprobs' to LLM"
            )
        self.llm = llm
        self._seeds: random.Random | None = None
        self._trained: tuple[Any, int] = (None, -1)  # the state and the step of the weights
        llm.engine.add_extension(EndAt())

    def __call__(self, prompts: list[Prompt], trainer: "GRPOTrainer") -> dict[str, list[Any]]:
        """Return "prompt_ids", "completion_ids" and "logprobs": a list for each of `prompts`.

        TRL's sampler repeats each prompt `num_generations` times, so each entry of `prompts` gets
        one completion.
        """
        check_supported(trainer)
        prompt_ids = tokenize(prompts, trainer)
        # The engine computes a prompt once for its `n` completions.
        groups = [(ids, len(list(equal))) for ids, equal in groupby(prompt_ids)]
        params = [sampling_params(trainer, n, self._next_seed(trainer)) for _, n in groups]
        self._update_weights(trainer)
        outputs = self.llm.generate([ids for ids, _ in groups], params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        answers = [answer for output in outputs for answer in output.outputs]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [answer.token_ids for answer in answers],
            "logprobs": [
                [
                    candidates[token].logprob
                    for token, candidates in zip(answer.token_ids, answer.logprobs, strict=True)
                ]
                for answer in answers
            ],
        }

    def enable_correction(self, trainer: "GRPOTrainer") -> None:
        """Let the trainer correct for differences of the engine's log-probabilities from its own.

        TRL's importance-sampling correction (`vllm_importance_sampling_correction` and the options
        of that name) and its metrics `sampling/...` are for vLLM only, and need `use_vllm`. It may
        be set as soon as the trainer exists, because vLLM is only imported before. Use this with an
        engine or a trainer in 16 bits. It costs a forward pass of the trainer for each batch.
        """
        if trainer.rollout_func is not self or trainer.args.use_vllm:
            raise ValueError(
                f"rollout_func={trainer.rollout_func!r} and use_vllm={trainer.args.use_vllm}: "
                f"pass rollout_func=rollouts to GRPOTrainer, and use_vllm=False to GRPOConfig"
            )
        trainer.use_vllm, trainer.vllm_generation = True, self
        trainer._last_loaded_step = -1

    def sync_weights(self) -> None:
        """Do nothing: TRL calls this before `__call__`, which updates the weights itself."""

    def _next_seed(self, trainer: "GRPOTrainer") -> int:
        if self._seeds is None:
            # Processes may get the same prompt, and must sample different completions.
            self._seeds = random.Random(f"{trainer.args.seed} {trainer.accelerator.process_index}")
        return self._seeds.getrandbits(63)

    def _update_weights(self, trainer: "GRPOTrainer") -> None:
        """Give the trainer's weights to the engine if it has made a step since the last time."""
        state, step = self._trained
        # `train` begins with a new state, whose step may be one that was seen before.
        if state is not trainer.state or step != trainer.state.global_step:
            model = trainer.accelerator.unwrap_model(trainer.model)
            self.llm.update_weights(model, version=trainer.state.global_step)
            self._trained = (trainer.state, trainer.state.global_step)


def check_supported(trainer: "GRPOTrainer") -> None:
    """Raise `ValueError` for a trainer whose rollouts or weights would be wrong or incomplete."""
    tokenizer = trainer.processing_class
    reasons = {
        "a PEFT model: train all weights": getattr(trainer.model, "peft_config", None),
        "FSDP or DeepSpeed: train without": trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
        "tools: let rollout_func be None": trainer.tools,
        "a processor for images: pass a tokenizer as processing_class": not isinstance(
            tokenizer, PreTrainedTokenizerBase
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(f"NanoserveRollouts does not support {reason}")


def tokenize(prompts: AbstractSequence[Prompt], trainer: "GRPOTrainer") -> list[list[int]]:
    """Return the token ids of each prompt, as `GRPOTrainer` computes them."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    return tokenizer.apply_chat_template(
        prompts,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )["input_ids"]


def sampling_params(trainer: "GRPOTrainer", n: int, seed: int) -> SamplingParams:
    """Return the sampling parameters of `trainer.args` for `n` completions of a prompt."""
    args, given = trainer.args, dict(trainer.args.generation_kwargs or {})
    if not RESERVED.isdisjoint(given):
        raise ValueError(
            f"generation_kwargs={given}: NanoserveRollouts sets {sorted(RESERVED & given.keys())} "
            f"itself, or cannot set it; remove it"
        )
    end_at = [*trainer.eos_token_ids, *(given.pop("stop_token_ids", None) or ())]
    params = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,  # None is off
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
        **given,
    }
    return SamplingParams(
        **params,
        n=n,
        seed=seed,
        logprobs=0,
        ignore_eos=True,
        extra_args={"end_at": end_at},
        detokenize=bool(given.get("stop")),  # TRL decodes the completions
    )
