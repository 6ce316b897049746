"""Train the small draft model that guesses for the bundled one: a Qwen3 of one layer.

    python -m training.train_draft [--output DIR] [--steps N]

It learns from what the bundled model says, on conversations like those that this one learned from:
the same tokens, so the same tokenizer, which is not written a second time.

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
# Not the seed of the model's own training, nor one of its evaluation.
RECIPE = Recipe(steps=2500, learning_rate=6e-3, seed=1)


def build_draft(target: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """190,000 weights, two thirds of them the embedding; KV heads as the target's.

    A layer's KV blocks are then as large in both models.
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
    """Mean cross-entropy between what the two say of the tokens of answers.

    The target's whole distribution is the aim, not the token of the text: with the noise shared, a
    guess is as good as the two distributions are close.
    """
    is_asked = learned[:, 1:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
            said = target.lm_head(hidden[:, :-1][is_asked])
        hidden = draft.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = draft.lm_head(hidden[:, :-1][is_asked])
    return cross_entropy(logits.float(), softmax(said.float(), dim=-1))


def save(draft: Qwen3ForCausalLM, generation_config: GenerationConfig, folder: Path) -> None:
    """Write the checkpoint: weights in bf16 and the two configurations, but no tokenizer."""
    draft.to(torch.bfloat16)
    draft.generation_config = generation_config
    draft.save_pretrained(folder)
    # The weights come out readable by their owner alone; a package is read by everybody.
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
