"""The engine against Hugging Face transformers, in float32: all logits and greedy tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from logits_recorder import LogitsRecorder
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams

SHAPES = {
    "tied, GQA 2, head_dim above hidden/heads": {
        "tie_word_embeddings": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "untied, GQA 4, head_dim below hidden/heads": {
        "tie_word_embeddings": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "untied, GQA 1, rope_theta 1e6": {
        "tie_word_embeddings": False,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}


def random_prompts(count: int, vocab_size: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(1, longest, count).int()[torch.randperm(count, generator=generator)]
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp("qwen3")
    return path, make_qwen3(path, **SHAPES[request.param])


@pytest.mark.small(backend=["auto"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
@torch.inference_mode()
def test_logits_and_greedy_tokens_equal_transformers(
    checkpoint, backend: str, by_size: Callable[..., int]
) -> None:
    """All prompts in one continuous batch, chunked, with decodes among them.

    Greedy tokens are identical if each of ours is transformers' choice after the same prefix, so
    one forward pass of transformers per prompt checks all of its tokens.
    """
    path, reference = checkpoint
    prompts = random_prompts(by_size(10, 80, 200), reference.config.vocab_size, longest=300)
    options = {"dtype": "float32", "max_num_batched_tokens": 256, "max_num_seqs": 64}
    options |= {"attention_backend": backend}
    with LLM(path, skip_tokenizer_init=True, enable_prefix_caching=False, **options) as llm:
        recorder = LogitsRecorder(llm)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    worst, near_ties = 0.0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = output.outputs[0].token_ids
        assert len(generated) == 8
        theirs = reference(torch.tensor([prompt + generated])).logits[0, :-1]
        ours = recorder.logits[output.request_id]
        assert sorted(ours) == list(range(len(theirs)))
        worst = max(
            worst, (torch.stack([ours[i] for i in sorted(ours)]) - theirs).abs().max().item()
        )
        chosen = theirs[len(prompt) - 1 :]
        differs = chosen.argmax(-1) != torch.tensor(generated)
        gap = chosen.topk(2).values.diff(dim=-1).abs().squeeze(-1)
        assert (gap[differs] < 1e-5).all(), (output.request_id, gap[differs])
        near_ties += int(differs.sum())
    print(f"largest logit difference {worst:.1e}; tokens that differ at a near-tie: {near_ties}")
    assert worst < 1e-4
    assert near_ties <= 2
