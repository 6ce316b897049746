"""A CPU kernel refuses what does not fit, before it has an address: none reads past an array."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from nanoserve.models.layers.numba_ops import NumbaOps

SCRIPT = Path(__file__).parents[2] / "support" / "kernel_arguments.py"


def test_each_argument_wrong_in_each_way_is_a_value_error(full_size: bool) -> None:
    """In a process of its own, which a kernel that believes a wrong shape would end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, SCRIPT, *(() if full_size else ("small",))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    outcomes = [line.split(" | ", 3) for line in lines]
    wrong = [
        line
        for line, (*_, found) in zip(lines, outcomes, strict=True)
        if found != "right" and not found.startswith("ValueError")
    ]
    assert not wrong, wrong
    of_function = Counter(function for function, *_ in outcomes)
    assert len(of_function) >= 12 and min(of_function.values()) >= 10, of_function


def test_a_norm_of_another_size_is_told_with_both() -> None:
    with pytest.raises(ValueError, match=r"float32 \[3, 8\].*float32 \[16\]"):
        NumbaOps().rms_norm(torch.randn(3, 8), torch.ones(16), 1e-6)
