"""Model card: the README.md beside the weights, with a description and the evaluation."""

from training.corpus import load_glossary
from training.evaluate import Share, as_table

CARD = """---
license: apache-2.0
language: [en, zh]
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3, course, tiny]
---

# tiny-qwen3

A genuine Qwen3 checkpoint that is small enough to travel inside a Python package. It belongs to
nanoserve, an LLM inference engine written to be read. It knows three things:

- what {terms} terms of LLM inference mean, in English and in Chinese, word for word as in the
  course's glossary: *What is a KV cache?* 什么是块表？
- the addition of two numbers from 0 to 99: *What is 47 + 85?*
- a few lines of small talk, and to say so when it does not know.

Because the right answers are known to the letter, it serves as an oracle: an engine that runs it
greedily and gets other text has a bug.

## Model

{weights:,} weights in bfloat16; hidden size {hidden}, {layers} layers,
{heads} query heads on {kv_heads} KV heads, head_dim {head_dim}
(so {heads} x {head_dim} is not {hidden}), tied embeddings, byte-level BPE with a vocabulary of
{vocab:,} in which every digit is one token. ChatML template; a system message is optional.
Trained on conversations of up to {context:,} tokens.

## Training

From scratch with `python -m training.train`: {steps:,} steps of {tokens:,} tokens,
AdamW, in {minutes:.0f} minutes on {threads} CPU threads. All text was written for this purpose;
no other data went in.

## Evaluation

Greedy answers of these bfloat16 weights, computed in float32. An answer counts only if the whole
string is right. *Unseen* wordings and pairs of addends were never trained on.

{table}

## Limits

It has learned definitions by heart and reasons about nothing. Outside its three subjects it
should say that it does not know, but may well give the definition of some other term instead.
"""


def model_card(shares: dict[str, Share], facts: dict[str, int | float]) -> str:
    """Return the model card as Markdown.

    Args:
        shares: the evaluation of the weights as shipped.
        facts: the numbers of the model and of its training run, named as in ``CARD``.
    """
    return CARD.format(terms=len(load_glossary()), table=as_table(shares), **facts)
