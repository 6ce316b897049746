"""Checkpoints that store the weights of all experts of a layer as one tensor, a stack of matrices.

Most checkpoints have a tensor for each expert, which is what a layer lists. A model's class
declares the stacks in which its checkpoints may have them instead: `stacked_experts =
{"gate_up_proj": ("gate_proj", "up_proj")}` means that `experts.gate_up_proj`, [experts, rows,
columns], has for each expert the rows of gate_proj, followed by the rows of up_proj.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import replace

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor

_OF_AN_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def from_stacks(
    expected: Mapping[str, list[CheckpointTensor]],
    stacks: Mapping[str, tuple[str, ...]],
    stored: Container[str],
) -> dict[str, list[CheckpointTensor]]:
    """Return `expected` with each expert's tensors replaced by their parts of a stored stack.

    stored: the names of the tensors in the checkpoint.
    """
    stack_of = {part: name for name, parts in stacks.items() for part in parts}
    found: dict[str, list[CheckpointTensor]] = {}
    for name, tensors in expected.items():
        match = _OF_AN_EXPERT.fullmatch(name)
        stack = "" if match is None else f"{match[1]}.{stack_of.get(match[3], '')}"
        if match is None or stack not in stored:
            found[name] = tensors
            continue
        parts = stacks[stack_of[match[3]]]
        rows = [expected[f"{match[1]}.{match[2]}.{part}.weight"][0].shape[0] for part in parts]
        first = sum(rows[: parts.index(match[3])])
        found.setdefault(stack, []).extend(
            replace(
                tensor,
                shape=(0, sum(rows), *tensor.shape[1:]),
                start=first + tensor.start,
                index=int(match[2]),
            )
            for tensor in tensors
        )
    return {name: _counted(tensors) for name, tensors in found.items()}


def _counted(tensors: list[CheckpointTensor]) -> list[CheckpointTensor]:
    """Return the parts of a stack with its whole shape; other tensors as they are."""
    if tensors[0].index is None:
        return tensors
    num_experts = 1 + max(tensor.index or 0 for tensor in tensors)
    return [replace(tensor, shape=(num_experts, *tensor.shape[1:])) for tensor in tensors]
