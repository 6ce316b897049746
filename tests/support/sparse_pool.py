"""K and V of more than 2^31 values, with Triton's interpreter on memory that is hardly there.

    python tests/support/sparse_pool.py ["decode_attention", "paged_attention" or "store_kv"]...

The pool is mapped and not reserved: Linux gives memory to the few pages that are touched. The last
blocks are written and read, and the exit status says whether these were the right ones. With names,
the kernels of the files so named compute in 32 bits, one after the other ("" is none), which must
not go unseen: prints a line of JSON for each, with its exit status and standard error.
"""

import json
import mmap
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import interpreter
import torch
from triton.runtime.interpreter import GridExecutor

import nanoserve.kernels.triton

_MAP_NORESERVE = 0x4000  # Linux's; Python has no name for it
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 2, 16, 64
NUM_BLOCKS = 2**31 // (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + 500


def plant(name: str, directory: Path) -> None:
    """The kernels of `name` without 64-bit offsets, from copies in `directory`."""
    (package,) = nanoserve.kernels.triton.__path__
    shutil.copytree(package, directory, dirs_exist_ok=True)
    for file in directory.glob(f"*{name}*.py"):
        file.write_text(file.read_text().replace(".to(tl.int64)", ""))
    nanoserve.kernels.triton.__path__ = [str(directory)]


def make_pool() -> torch.Tensor:
    shape = (2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    num_bytes = 2 * torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.float16).view(shape)


def check_store_kv(pool: torch.Tensor, table: list[int]) -> None:
    from nanoserve.kernels.triton.store_kv import store_kv

    context = len(table) * BLOCK_SIZE - 12
    heads = torch.randn(context, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).half()
    positions = torch.arange(context, dtype=torch.int32)
    slots = torch.tensor([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in positions])
    cos, sin = torch.ones(context, HEAD_DIM // 2).half(), torch.zeros(context, HEAD_DIM // 2).half()
    store_kv(heads, positions, cos, sin, None, None, 0.0, pool, slots.int())
    kv = heads[:, NUM_HEADS:].unflatten(1, (2, NUM_KV_HEADS))
    for i in range(context):
        stored = pool[:, table[i // BLOCK_SIZE], :, i % BLOCK_SIZE]
        assert torch.equal(stored, kv[i]), f"token {i} is not in its slot"


def check_attention(pool: torch.Tensor, table: list[int]) -> None:
    """A decode row and a chunk, over the same keys."""
    from nanoserve.kernels.triton.paged_attention import paged_attention

    pool[:, table] = torch.randn(2, len(table), *pool.shape[2:]).half()
    context, num_queries = len(table) * BLOCK_SIZE - 12, 3
    q = torch.randn(1 + num_queries, NUM_HEADS, HEAD_DIM).half()
    out = paged_attention(
        q,
        pool,
        torch.tensor([0, 1, 1 + num_queries], dtype=torch.int32),
        torch.tensor([context, context], dtype=torch.int32),
        torch.tensor([table, table], dtype=torch.int32),
        scale=HEAD_DIM**-0.5,
        num_decode_rows=1,
        max_context_len=context,
    )
    keys, values = (
        kv[table].transpose(0, 1).flatten(1, 2).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0)
        for kv in pool.unbind()
    )  # each [num_heads, keys, head_dim]
    for query, seen in ((0, context), *((1 + i, context - 2 + i) for i in range(num_queries))):
        scores = torch.einsum("hd,hkd->hk", q[query].float(), keys[:, :seen].float())
        weights = (scores * HEAD_DIM**-0.5).softmax(-1)
        expected = torch.einsum("hk,hkd->hd", weights, values[:, :seen].float())
        error = (out[query].float() - expected).abs().max().item()
        assert error < 2e-3, f"query {query} is off by {error:.3f}"


def check(planted: str = "") -> None:
    """In a process that has imported none of these kernels yet."""
    # The interpreter copies all arguments back from where it thinks they were brought from.
    GridExecutor._restore_args_dev = lambda self, *args: None
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        if planted:
            plant(planted, Path(directory))
        try:
            pool = make_pool()
        except OSError as error:
            sys.exit(f"no such mapping: {error}")
        assert pool[0].numel() > 2**31
        check_store_kv(pool, table=[NUM_BLOCKS - 1, NUM_BLOCKS - 7])
        check_attention(pool, table=[NUM_BLOCKS - 2, NUM_BLOCKS - 9])


def check_in_a_child(planted: str) -> None:
    """What computes in 32 bits may not survive it. A fork has torch imported already."""
    with tempfile.TemporaryFile("w+") as stderr:
        if (pid := os.fork()) == 0:
            os.dup2(stderr.fileno(), sys.stderr.fileno())
            try:
                check(planted)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        stderr.seek(0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"planted": planted, "status": code, "stderr": stderr.read()}), flush=True)


if __name__ == "__main__":
    interpreter.prepare()
    for name in sys.argv[1:]:
        check_in_a_child(name)
    if not sys.argv[1:]:
        check()
