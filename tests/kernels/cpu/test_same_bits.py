"""A row's bits do not depend on the rows beside it, nor on which process compiled the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from types import SimpleNamespace
import torch
from nanoserve.attention.kv_cache import KVCache
from nanoserve.kernels.cpu import ops, store_kv
from nanoserve.models.layers.numba_ops import NumbaOps

def answers():
    dtype = getattr(torch, sys.argv[1])
    torch.manual_seed(0)
    def random(*shape):
        return torch.randn(shape).to(dtype)
    numba, rows, places = NumbaOps(), 2**15, torch.arange(2**15, dtype=torch.int32)
    x, residual, weight = random(rows, 192), random(rows, 192), random(192)
    yield numba.rms_norm(x, weight, 1e-6)
    yield numba.act_and_mul(torch.cat([x, residual], 1), "silu")
    yield numba.act_and_mul(torch.cat([x, residual], 1), "gelu_pytorch_tanh")
    yield numba.swiglu(torch.cat([x, residual], 1), (1.702, 7.0, 1.0))
    yield from numba.add_rms_norm(x, residual, weight, 1e-6)
    rotary = SimpleNamespace(cos=random(rows, 16), sin=random(rows, 16))
    norm = SimpleNamespace(weight=random(32), eps=1e-6)
    cache = torch.zeros(2, 2**11, 2, 16, 32, dtype=dtype)
    where = SimpleNamespace(positions=places, slot_mapping=places)
    yield numba.norm_rotate_store(random(rows, 8, 32), rotary, (norm, norm), KVCache(cache), where)
    yield cache

found = []
for few in (2**30, 0):
    ops.FEW = store_kv.FEW = few
    found.append(list(answers()))
for alone, together in zip(*found, strict=True):
    print(f"{(alone != together).sum()} {together.double().sum().item().hex()}")
"""


@pytest.mark.size("full")  # compiles all for seconds; test_numba.py shows one without a process
@pytest.mark.full(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_alone_or_among_many_compiled_or_loaded(dtype: str, tmp_path: Path) -> None:
    """Numba links what it loads otherwise than what it compiles: another copy of an inner function
    may be called, compiled in other surroundings."""
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", SCRIPT, dtype]
    compiling, loading = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert compiling == loading
    lines = compiling.splitlines()
    assert len(lines) == 8 and all(line.startswith("0 ") for line in lines), lines
