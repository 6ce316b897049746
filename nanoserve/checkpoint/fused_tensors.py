"""Checkpoints that store several linears as one tensor, as a model's `fused_tensors` says."""

from collections.abc import Mapping
from dataclasses import replace

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor


def as_stored(
    expected: Mapping[str, list[CheckpointTensor]], fused_tensors: Mapping[str, tuple[str, ...]]
) -> dict[str, list[CheckpointTensor]]:
    """The tensors under the names that the checkpoint has for them, with their places in the whole.

    `expected` has one tensor under each name of its own.
    """
    stored: dict[str, list[CheckpointTensor]] = {}
    fused_names = {part: name for name, parts in fused_tensors.items() for part in parts}
    for name, (tensor,) in expected.items():
        stem, _, kind = name.rpartition(".")  # "...self_attn.q_proj" and "weight"
        part = stem.rpartition(".")[2]
        if part in fused_names:
            parent, fused_name = stem.removesuffix(part), fused_names[part]
            parts = fused_tensors[fused_name]
            rows = [expected[f"{parent}{other}.{kind}"][0].shape[0] for other in parts]
            name = f"{parent}{fused_name}.{kind}"
            shape = (sum(rows), *tensor.shape[1:])
            start = tensor.start + sum(rows[: parts.index(part)])
            tensor = replace(tensor, shape=shape, start=start)
        stored.setdefault(name, []).append(tensor)
    return stored
