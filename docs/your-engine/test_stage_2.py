"""Stage 2: the same tokens with a cache, and each computed once."""

from typing import Any

import pytest
import torch

from .stages import model, naive_tokens, stage
from .your_engine import Cache, attention, generate


@stage(2)
def test_chunks_are_attended_as_a_whole() -> None:
    q, k, v = torch.randn(3, 7, 2, 4, generator=torch.Generator().manual_seed(0))
    cache, pieces = Cache(), [slice(0, 4), slice(4, 5), slice(5, 7)]
    for layer in (0, 1):  # layers do not share keys
        found = torch.cat([cache.attend(layer, q[at], k[at], v[at]) for at in pieces])
        case = f"layer {layer}: 7 tokens in pieces of 4, 1 and 2"
        assert torch.allclose(found, attention(q, k, v), atol=1e-5), case


@pytest.mark.parametrize("prompt", [[1], [5, 5, 5], [*range(300, 330)]])
@stage(2)
def test_the_tokens_are_those_without_a_cache(prompt: list[int]) -> None:
    found = generate(model(), prompt, 12, Cache())
    assert found == naive_tokens(tuple(prompt), 12), f"generate(model, {prompt}, 12, Cache())"


@stage(2)
def test_each_token_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = model().forward, []

    def counted(token_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        seen.append(positions.tolist())
        return forward(token_ids, positions, attend)

    monkeypatch.setattr(model(), "forward", counted)
    generate(model(), [9, 8, 7, 6], 4, Cache())
    case = "positions of each pass of generate(model, [9, 8, 7, 6], 4, Cache())"
    assert seen == [[0, 1, 2, 3], [4], [5], [6]], case
