"""Stage 3: a sequence whose K and V are scattered over a pool."""

from typing import Any

import pytest
import torch

from .stages import model, naive_tokens, stage
from .your_engine import Pool, attention, blocks_needed


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
@stage(3)
def test_the_last_block_may_be_partly_empty(num_tokens: int, blocks: int) -> None:
    found = blocks_needed(num_tokens, 4)
    assert found == blocks, f"blocks_needed({num_tokens}, 4) is {found}, right {blocks}"


@stage(3)
def test_the_slots_of_the_chapter() -> None:
    positions = torch.tensor([35, 0, 15, 16, 63])
    slots = Pool(model(), 12, 16).slots([5, 2, 8, 12], positions)
    case = f"Pool(model, 12, 16).slots([5, 2, 8, 12], {positions})"
    assert slots.tolist() == [131, 80, 95, 32, 207], case


@pytest.mark.parametrize("block_size", [1, 3, 4])
@stage(3)
def test_what_is_stored_is_gathered(block_size: int) -> None:
    pool, generator = Pool(model(), 12, block_size), torch.Generator().manual_seed(0)
    heads, dim = model().config["num_key_value_heads"], model().config["head_dim"]
    # Two sequences and two layers, written alternately.
    tables = {"a": [9, 2, 7, 1, 12], "b": [4, 11, 3, 10, 5]}
    contents = {
        (layer, name): torch.randn(2, 5, heads, dim, generator=generator)
        for layer in (0, 3)
        for name in tables
    }
    for start, end in ((0, 2), (2, 5)):
        for (layer, name), (k, v) in contents.items():
            slots = pool.slots(tables[name], torch.arange(start, end))
            pool.store(layer, slots, k[start:end], v[start:end])
    for (layer, name), (k, v) in contents.items():
        for length in (1, 3, 5):
            found = pool.gather(layer, tables[name], length)
            case = f"gather({layer}, {tables[name]}, {length}), blocks of {block_size}"
            for x, right in zip(found, (k, v), strict=True):
                assert torch.equal(x, right[:length]), case


@pytest.mark.parametrize("block_size", [1, 4, 16])
@stage(3)
def test_the_model_runs_on_a_pool(block_size: int) -> None:
    """A prompt in two chunks, then token by token; stage 7 does it for many sequences at once."""
    prompt, num_new = [*range(300, 318)], 6
    pool, table = Pool(model(), 30, block_size), [*range(30, 0, -1)]
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + num_new:
        end = 10 if computed == 0 else len(tokens)
        positions = torch.arange(computed, end)
        slots = pool.slots(table, positions)

        def attend(layer: int, *qkv: Any, slots: Any = slots, end: int = end) -> torch.Tensor:
            pool.store(layer, slots, *qkv[1:])
            return attention(qkv[0], *pool.gather(layer, table, end))

        hidden = model().forward(torch.tensor(tokens[computed:end]), positions, attend)
        computed = end
        if computed == len(tokens):
            tokens.append(int(model().logits(hidden[-1]).argmax()))
    case = f"the {num_new} tokens after {prompt}, blocks of {block_size}, table {table}"
    assert tokens[len(prompt) :] == naive_tokens(tuple(prompt), num_new), case
