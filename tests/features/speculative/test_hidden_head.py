"""The head on hidden states: its steps, its file."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanoserve.features.speculative.hidden_head import HiddenHead, read_head
from nanoserve.models.layers.context import LayerContext

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_ROWS, NUM_DRAFTS = 12, 20, 5, 3


@pytest.fixture
def head() -> HiddenHead:
    torch.manual_seed(0)
    return HiddenHead.untrained(HIDDEN_SIZE, INTERMEDIATE_SIZE)


def test_it_unrolls_to_its_steps(head: HiddenHead) -> None:
    """What training and measuring call is what an engine does one by one."""
    state = torch.randn(NUM_ROWS, HIDDEN_SIZE)
    embeddings = torch.randn(NUM_ROWS, NUM_DRAFTS, HIDDEN_SIZE)
    unrolled = head.unroll(state, embeddings)
    for j in range(NUM_DRAFTS):
        state, for_lm_head = head(state, embeddings[:, j])
        assert state.shape == for_lm_head.shape == (NUM_ROWS, HIDDEN_SIZE)
        assert torch.equal(for_lm_head, unrolled[:, j])


def test_its_rows_are_their_own(head: HiddenHead) -> None:
    hidden = torch.randn(NUM_ROWS, HIDDEN_SIZE)
    embeddings = torch.randn(NUM_ROWS, NUM_DRAFTS, HIDDEN_SIZE)
    alone = head.unroll(hidden[2:3], embeddings[2:3])
    torch.testing.assert_close(head.unroll(hidden, embeddings)[2:3], alone)


def test_a_file_gives_it_back(head: HiddenHead, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    head.save(path)
    loaded = HiddenHead.of(read_head(path), LayerContext(dtype=torch.bfloat16))
    assert not any(weight.requires_grad for weight in loaded.parameters())
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16))


def rewrite(path: Path, change) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(weights, metadata)
    save_file(weights, path, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, metadata: metadata.pop("shape"), "has no 'shape' in its metadata"),
        (lambda weights, metadata: metadata.update(shape="[12]"), "is not a JSON object"),
        (
            lambda weights, metadata: metadata.update(shape='{"hidden_size": 12}'),
            "intermediate_size=None must be an integer",
        ),
        (lambda weights, metadata: weights.pop("norm.weight"), "but its metadata requires"),
        (
            lambda weights, metadata: weights.update({"norm.weight": torch.zeros(13)}),
            "but its metadata requires",
        ),
        (
            lambda weights, metadata: metadata.update(
                shape='{"hidden_size": 1000000, "intermediate_size": 1000000}'
            ),
            "but its metadata requires",
        ),
    ],
)
def test_a_file_of_another_shape_is_refused(head: HiddenHead, tmp_path, change, message) -> None:
    path = tmp_path / "head.safetensors"
    head.save(path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        read_head(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    path.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        read_head(path)
