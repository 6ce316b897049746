"""Stage 1: the model, against torch and transformers."""

import pytest
import torch
import torch.nn.functional as F

from .compare import CHECKPOINT
from .stages import model, naive_logits, stage
from .your_engine import attention, generate, rms_norm, rotate

PROMPTS = [[1], [5, 5, 5], list(range(300, 340)), [7, 1999, 42, 1000, 3]]


@stage(1)
def test_the_norm_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 2, 8, generator=generator), torch.rand(8, generator=generator)
    expected = F.rms_norm(x, (8,), weight, 1e-6)
    case = f"rms_norm({x.tolist()}, {weight.tolist()}, 1e-6)"
    assert torch.allclose(rms_norm(x, weight, 1e-6), expected, atol=1e-6), case


@stage(1)
def test_a_rotation_is_a_product_of_complex_numbers() -> None:
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 1, 7, 500])
    angles = positions[:, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * angles)[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    case = f"rotate({x.tolist()}, {positions}, 100.0)"
    assert torch.allclose(rotate(x, positions, 100.0), expected, atol=1e-4), case


@pytest.mark.parametrize(("n", "length"), [(1, 1), (5, 5), (1, 9), (3, 9)])
@stage(1)
def test_attention_is_torchs(n: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(n, 4, 8, generator=generator)
    k, v = torch.randn(2, length, 2, 8, generator=generator)
    seen = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    one = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*one, seen, enable_gqa=True)[0].transpose(0, 1)
    case = f"attention of {n} queries, the last of {length} tokens, 4 heads and 2 KV heads"
    found = attention(q, k, v)
    assert found.shape == q.shape, case
    assert torch.allclose(found, expected, atol=1e-5), case


@stage(1)
def test_logits_are_those_of_transformers() -> None:
    model()
    from transformers import Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    differences = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0, -1]
        differences.append(float((naive_logits(prompt) - expected).abs().max()))
    # Show all of them: which prompts are right shows where to look (hint 3).
    case = [f"{each:.5f} after {p}" for p, each in zip(PROMPTS, differences, strict=True)]
    assert max(differences) < 1e-3, "logits differ by up to " + ", ".join(case)


@pytest.mark.parametrize("prompt", PROMPTS[:3])
@stage(1)
def test_it_generates_the_most_likely_tokens(prompt: list[int]) -> None:
    before = list(prompt)
    found = generate(model(), prompt, 5)
    assert prompt == before, f"generate(model, {before}, 5) has changed the prompt"
    assert len(found) == 5, f"generate(model, {prompt}, 5) gave {found}"
    for i, token in enumerate(found):
        best = int(naive_logits(prompt + found[:i]).argmax())
        assert token == best, f"generate(model, {prompt}, 5) gave {found}; number {i} is {best}"
