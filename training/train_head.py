"""Train the head that guesses ahead of the bundled model: `nanoserve.features.speculative.hidden_head`.

    python -m training.train_head [--output FILE] [--steps N]

It reads the conversations that the model was trained on, drawn anew, and learns to guess what the
model says next, several tokens ahead. The text need not be the model's own: sampled at temperature
1, of 1,000 of its answers 4 are not the corpus's, word for word.

The shipped head took ten minutes on one CPU thread of a busy machine. Every random choice is
seeded; see `train.py` for what that promises.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.features.speculative.hidden_head import HiddenHead
from training.corpus import BUNDLED
from training.train import Recipe, RowPacker, train_model

HEAD_PATH = BUNDLED / "head.safetensors"
# Not the seed of the model's own training, nor one of its evaluation.
RECIPE = Recipe(steps=2500, learning_rate=6e-3, seed=1)
INTERMEDIATE_SIZE = 512
NUM_GUESSES = 6  # that a step of training makes in a row; an engine may ask for more
STARTS_PER_STEP = 512  # positions, of about a thousand that a batch has


def starts_of(learned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where guessing can begin, and how far it can go.

    learned: [num_rows, length], which tokens are of an answer. Returns (row, position) of hidden
    states that give a token of an answer with another one behind it, each [num_starts], and which
    guesses are of that answer too, [num_starts, NUM_GUESSES].
    """
    row, position = (learned[:, 1:-1] & learned[:, 2:]).nonzero(as_tuple=True)
    guessed = position[:, None] + 2 + torch.arange(NUM_GUESSES)
    is_in_row = guessed < learned.shape[1]
    is_answer = learned[row[:, None], guessed.clamp(max=learned.shape[1] - 1)] & is_in_row
    return row, position, is_answer.cumprod(dim=1).bool()  # a later answer is another one


def guess_loss(head: HiddenHead, target: Qwen3ForCausalLM, ids: Tensor, learned: Tensor) -> Tensor:
    """Mean cross-entropy between what the target says of a token and what the head guesses.

    The target's whole distribution is the aim, not the token of the text: with the noise shared, a
    guess is as good as the two distributions are close.
    """
    row, position, is_answer = starts_of(learned)
    drawn = torch.randperm(len(row))[:STARTS_PER_STEP]
    row, position, is_answer = row[drawn], position[drawn], is_answer[drawn]
    # Known are hidden states t and the tokens t + 1, ...; guess j is of what the hidden state at
    # t + j says.
    seen = position[:, None] + 1 + torch.arange(NUM_GUESSES)
    seen = seen.clamp(max=ids.shape[1] - 1)  # where is_answer is False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
            said = target.lm_head(hidden[row[:, None], seen][is_answer])
            embeddings = target.model.embed_tokens(ids[row[:, None], seen])
        guessed = head.unroll(hidden[row, position].float(), embeddings)
        logits = target.lm_head(guessed[is_answer])
    return cross_entropy(logits.float(), softmax(said.float(), dim=-1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the head that guesses for tiny-qwen3.")
    parser.add_argument("--output", type=Path, default=Path("head.safetensors"))
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(RECIPE.seed)
    folder = bundled_checkpoint("tiny-qwen3")
    target = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    recipe = Recipe(steps=args.steps, learning_rate=RECIPE.learning_rate, seed=RECIPE.seed)
    packer = RowPacker(PreTrainedTokenizerFast.from_pretrained(folder), recipe)
    eps = target.config.rms_norm_eps
    head = HiddenHead.untrained(target.config.hidden_size, INTERMEDIATE_SIZE, eps)
    head.norm.load_state_dict(target.model.norm.state_dict())
    start = time.perf_counter()
    train_model(head, partial(guess_loss, head, target), packer, recipe)
    head.save(args.output)
    print(f"{(time.perf_counter() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
