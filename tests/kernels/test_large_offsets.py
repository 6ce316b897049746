"""KV pools of more than 2^31 values: in 32 bits, offsets of their last blocks would be negative."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
if sys.platform != "linux":
    pytest.skip("other systems reserve what is mapped", allow_module_level=True)

import sparse_pool


def run(*planted: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what computes in 32 bits may not survive it."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, sparse_pool.__file__, *planted]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "no such mapping" in shown.stderr:
        pytest.skip(shown.stderr.strip())
    return shown


def test_the_last_blocks_of_a_large_pool_are_written_and_read() -> None:
    shown = run()
    assert shown.returncode == 0, shown.stderr


@pytest.mark.small(kernel=["decode_attention", "paged_attention"])
@pytest.mark.parametrize("kernel", ["decode_attention", "paged_attention", "store_kv"])
def test_a_kernel_that_computes_in_32_bits_would_be_seen(kernel: str) -> None:
    shown = run(kernel)
    has_died_of_it = shown.returncode < 0 or "AssertionError" in shown.stderr
    assert has_died_of_it, (shown.returncode, shown.stderr)
