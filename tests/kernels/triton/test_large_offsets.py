"""KV pools of more than 2^31 values: in 32 bits, offsets of their last blocks would be negative."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")
if sys.platform != "linux":
    pytest.skip("other systems reserve what is mapped", allow_module_level=True)

import sparse_pool

KERNELS = ["decode_attention", "paged_attention", "store_kv"]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Exit status and standard error by what was planted, of the cases that run; "" is nothing."""
    cases = [item for item in request.session.items if item.path == request.path]
    planted = [item.callspec.params["kernel"] for item in cases if hasattr(item, "callspec")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, sparse_pool.__file__, "", *planted]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    found = [json.loads(line) for line in shown.stdout.splitlines()]
    if "no such mapping" in found[0]["stderr"]:
        pytest.skip(found[0]["stderr"].strip().splitlines()[-1])
    return {record["planted"]: record for record in found}


@pytest.mark.size("full")
def test_the_last_blocks_of_a_large_pool_are_written_and_read(
    ended: dict[str, dict[str, Any]],
) -> None:
    assert ended[""]["status"] == 0, ended[""]["stderr"]


@pytest.mark.size("full")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_computes_in_32_bits_would_be_seen(
    ended: dict[str, dict[str, Any]], kernel: str
) -> None:
    found = ended[kernel]
    assert found["status"] < 0 or "AssertionError" in found["stderr"], found
