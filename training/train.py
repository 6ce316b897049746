"""Train the bundled checkpoint from scratch: tokenizer, model, evaluation, model card.

    python -m training.train [--output DIR] [--steps N]

It needs ``transformers`` and about half an hour on two CPU cores. The run stops after a fixed
number of steps, not after a time, and every random choice is seeded: on the same machine, with
the same library versions and thread count, two runs give the same bytes. On another CPU or with
another thread count the sums are rounded in another order, so the weights differ; the evaluation
should not. The tokenizer and the conversations are the same everywhere.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from training.corpus import (
    Message,
    Turn,
    load_glossary,
    tokenizer_texts,
    training_turns,
)
from training.evaluate import Generate, as_table, evaluate, misses_as_text
from training.model_card import model_card
from training.phrasings import SYSTEM_MESSAGES

Loss = Callable[[Tensor, Tensor], Tensor]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
QUESTION = TURN_START + "user\n{question}" + TURN_END + "\n" + TURN_START + "assistant\n"
SYSTEM = TURN_START + "system\n{system}" + TURN_END + "\n"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# The pre-tokenizer pattern of Qwen2 and Qwen3. \p{N} without a plus makes every digit a token of
# its own, so that a small model can learn to carry.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the training run."""

    steps: int = 5500
    tokens_per_step: int = 2048
    # Row lengths in tokens, with the share of the steps that use each. Short rows are faster and
    # contain more first turns; long ones are needed for the tenth turn.
    row_lengths: tuple[int, ...] = (128, 256, 1024)
    row_length_weights: tuple[float, ...] = (0.35, 0.35, 0.3)
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    seed: int = 0
    vocab_size: int = 2048


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Qwen3's pre-tokenizer on the texts of the corpus.

    The alphabet has all 256 bytes, so any text can be encoded. With a vocabulary of 2,048, many
    Chinese characters and most emoji remain split into bytes, as in real serving.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(tokenizer_texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 of 2.7 million weights: 8 query heads, 2 KV heads, 8 x 32 != 192.

    Both are on purpose: an engine that confuses query heads with KV heads, or computes head_dim
    as hidden_size / num_heads, fails on this checkpoint.
    """
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        bos_token_id=None,
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


class RowPacker:
    """Packs conversations into rows of token ids, one per row, with as many turns as fit."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(recipe.seed + 1)
        self.encoded = map(self.encode, training_turns(recipe.seed))
        self.waiting = next(self.encoded)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode(self, turn: Turn) -> tuple[list[int], list[bool]]:
        """Return the token ids of one turn, and flags: True for those that are learned."""
        question = self.ids(QUESTION.format(question=turn.question))
        answer = self.ids(turn.answer + TURN_END)
        learned = [False] * len(question) + [True] * len(answer) + [False]
        return question + answer + self.ids("\n"), learned

    def row(self, length: int) -> tuple[list[int], list[bool]]:
        """Return one conversation as ``length`` token ids and flags, padded at the end."""
        ids: list[int] = []
        learned: list[bool] = []
        if self.rng.random() < 0.2:
            ids += self.ids(SYSTEM.format(system=self.rng.choice(SYSTEM_MESSAGES)))
            learned += [False] * len(ids)
        while len(ids) + len(self.waiting[0]) <= length:
            ids += self.waiting[0]
            learned += self.waiting[1]
            self.waiting = next(self.encoded)
        missing = length - len(ids)
        return ids + [self.tokenizer.pad_token_id] * missing, learned + [False] * missing

    def batches(self, recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches without end: token ids and learn flags, each ``[rows, length]``."""
        while True:
            length = self.rng.choices(recipe.row_lengths, recipe.row_length_weights)[0]
            rows = [self.row(length) for _ in range(recipe.tokens_per_step // length)]
            yield torch.tensor([ids for ids, _ in rows]), torch.tensor([flags for _, flags in rows])


def answer_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the answer tokens; questions are not predicted.

    Logits are computed for these positions only. Padding is at the end of a row, where the causal
    mask hides it, so no attention mask is needed.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][learned[:, 1:]])
    return cross_entropy(logits.float(), ids[:, 1:][learned[:, 1:]])


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate of a step: linear warmup, then half a cosine down to zero."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def train_model(model: nn.Module, loss_of: Loss, packer: RowPacker, recipe: Recipe) -> None:
    """Train `model` in place, and print the loss and the speed every 100 steps.

    loss_of: function (token ids, learn flags) of a batch of the packer -> the loss to minimise.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
    start = time.perf_counter()
    recent = 0.0
    for step, (ids, learned) in enumerate(islice(packer.batches(recipe), recipe.steps)):
        optimizer.param_groups[0]["lr"] = learning_rate(step, recipe)
        loss = loss_of(ids, learned)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent += loss.item()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - start
            speed = (step + 1) * recipe.tokens_per_step / seconds
            progress = f"step {step + 1:5d}  loss {recent / 100:.4f}"
            print(f"{progress}  {seconds:5.0f} s  {speed:6.0f} tok/s", flush=True)
            recent = 0.0


def transformers_generate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Generate:
    """Return a function that generates greedy answers with transformers.

    Batches have conversations of similar length, padded on the left.
    """

    def answer_batch(conversations: list[list[Message]], max_tokens: int) -> list[str]:
        inputs = tokenizer.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            outputs = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        new_tokens = outputs[:, inputs["input_ids"].shape[1] :]
        return tokenizer.batch_decode(new_tokens, skip_special_tokens=True)

    def generate(conversations: list[list[Message]], max_tokens: int) -> list[str]:
        lengths = [sum(len(message["content"]) for message in chat) for chat in conversations]
        by_length = sorted(range(len(conversations)), key=lengths.__getitem__)
        answers = [""] * len(conversations)
        for first in range(0, len(by_length), 128):
            chosen = by_length[first : first + 128]
            batch = answer_batch([conversations[i] for i in chosen], max_tokens)
            for index, answer in zip(chosen, batch, strict=True):
                answers[index] = answer
        return answers

    return generate


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint: weights in bf16, configuration, tokenizer, chat template, terms.

    generation_config.json has ``do_sample: false``, so that an engine which takes its defaults from
    there decodes greedily, as an oracle should. transformers refuses to save a temperature of 0
    beside it.
    """
    model.to(torch.bfloat16)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (TURN_END, END_OF_TEXT)}
    model.generation_config = GenerationConfig(
        eos_token_id=[ids[TURN_END], ids[END_OF_TEXT]],
        pad_token_id=ids[END_OF_TEXT],
        do_sample=False,
    )
    model.save_pretrained(folder)
    # safetensors makes the file readable by its owner alone; a package is read by every user.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # transformers 5 writes a new name of its generic class, which 4.x does not know; both know the
    # old one.
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    terms = json.dumps([term.term for term in load_glossary()], indent=2)
    (folder / "terms.json").write_text(terms + "\n", encoding="utf-8")


def facts(model: Qwen3ForCausalLM, recipe: Recipe, minutes: float) -> dict[str, int | float]:
    """Return the numbers in the model card."""
    config = model.config
    return {
        "weights": model.num_parameters(),
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "context": max(recipe.row_lengths),
        "steps": recipe.steps,
        "tokens": recipe.tokens_per_step,
        "minutes": minutes,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny-qwen3 checkpoint from scratch.")
    parser.add_argument("--output", type=Path, default=Path("tiny-qwen3"))
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    args = parser.parse_args()
    recipe = Recipe(steps=args.steps)
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(recipe)
    packer = RowPacker(tokenizer, recipe)
    model = build_model(recipe, tokenizer)
    start = time.perf_counter()
    train_model(model, partial(answer_loss, model), packer, recipe)
    minutes = (time.perf_counter() - start) / 60
    save(model, tokenizer, args.output)
    # Evaluate what is shipped: the weights as rounded to bf16, computed in float32.
    rounded = Qwen3ForCausalLM.from_pretrained(args.output, dtype=torch.float32).eval()
    shares = evaluate(transformers_generate(rounded, tokenizer), terms=load_glossary())
    card = model_card(shares, facts(rounded, recipe, minutes))
    (args.output / "README.md").write_text(card, encoding="utf-8")
    print(as_table(shares))
    print(misses_as_text(shares, limit=5))


if __name__ == "__main__":
    main()
