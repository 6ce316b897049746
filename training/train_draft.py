"""Train the small draft model for the bundled model: a Qwen3 of one layer.

    python -m training.train_draft [--output DIR] [--steps N]

It is distilled from the bundled model, on conversations of the same corpus. Both models have the
same tokenizer, which is not written a second time.

The shipped draft took nine minutes on one CPU thread of a busy machine. Every random choice is
seeded; see `train.py` for what that promises.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from training.corpus import BUNDLED
from training.train import Recipe, RowPacker, train_model

DRAFT_PATH = BUNDLED / "draft"
# The seed differs from those of the model's training and evaluation.
RECIPE = Recipe(steps=2500, learning_rate=6e-3, seed=1)


def build_draft(target: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """Return an untrained draft model of 190,000 weights, two thirds of them the embedding.

    It has as many KV heads as the target, so a block of one layer has the same size in both models.
    """
    config = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def distillation_loss(
    draft: Qwen3ForCausalLM, target: Qwen3ForCausalLM, ids: Tensor, learned: Tensor
) -> Tensor:
    """Return the mean cross-entropy between the two models' distributions of answer tokens.

    The draft model learns the target's distribution, not the token of the text: with shared noise,
    the acceptance rate depends on how close the two distributions are.
    """
    is_answer = learned[:, 1:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
            said = target.lm_head(hidden[:, :-1][is_answer])
        hidden = draft.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = draft.lm_head(hidden[:, :-1][is_answer])
    return cross_entropy(logits.float(), softmax(said.float(), dim=-1))


def save(draft: Qwen3ForCausalLM, generation_config: GenerationConfig, folder: Path) -> None:
    """Write the checkpoint: weights in bf16 and the two configurations, but no tokenizer."""
    draft.to(torch.bfloat16)
    draft.generation_config = generation_config
    draft.save_pretrained(folder)
    # safetensors makes the file readable by its owner alone; a package is read by every user.
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the draft model for tiny-qwen3.")
    parser.add_argument("--output", type=Path, default=Path("tiny-qwen3-draft"))
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = bundled_checkpoint("tiny-qwen3")
    target = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    recipe = Recipe(steps=args.steps, learning_rate=RECIPE.learning_rate, seed=RECIPE.seed)
    packer = RowPacker(PreTrainedTokenizerFast.from_pretrained(folder), recipe)
    draft = build_draft(target.config, recipe.seed)
    start = time.perf_counter()
    train_model(draft, partial(distillation_loss, draft, target), packer, recipe)
    save(draft, target.generation_config, args.output)
    print(f"{(time.perf_counter() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
