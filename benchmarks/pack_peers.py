"""Pack vLLM and nano-vllm for a GPU machine that has no network: archives of 40 MB in all.

    python benchmarks/pack_peers.py --out FOLDER [--nano-vllm CHECKOUT]

There, FOLDER/setup.sh unpacks all of them into one folder, where they do not overlap, compiles
modules that are imported late, and writes a cache file of vLLM's that saves starting another
Python:

    bash FOLDER/setup.sh PEERS
    python benchmarks/gpu_peers.py --engine vllm --peers PEERS
    PYTHONPATH=PEERS python ...                     vLLM, grammars
    PYTHONPATH=PEERS/nano:PEERS python ...          nano-vllm

That machine has Python 3.12, PyTorch, Triton, transformers and their dependencies. vLLM's libraries
contain machine code for a dozen GPUs. Code that is not for `--arch` is overwritten with zeros,
which compress to nothing: no address changes, and CUDA selects by headers, which stay. Kernels that
exist as PTX only are then missing (Marlin's, for weights in 4 bits). FlashAttention 3, which Hopper
uses, is packed, and FlashAttention 2 is not.

nano-vllm calls two functions of flash-attn, which has no wheels for every PyTorch. A package that
is written here does the same with vLLM's FlashAttention 3. It is in a separate folder, because vLLM
would mistake it for the real one.
"""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

_VLLM = "vllm==0.22.0"
_NANO_VLLM = "git+https://github.com/GeeeekExplorer/nano-vllm"
# Imports of vLLM for offline use, without transformers' dependencies; then grammars.
_PACKAGES = """
    annotated-types blake3 cachetools cbor2 distro fastapi gguf jiter msgspec openai<3
    openai-harmony opentelemetry-api partial-json-parser pybase64 pydantic pydantic-core pyzmq
    setproctitle sniffio starlette typing-inspection
    apache-tvm-ffi llguidance<2 jsonschema jsonschema-specifications referencing rpds-py xgrammar
"""
_LEFT_OUT = ("/vllm-rs", "/_flashmla", "/_vllm_fa2_C", "/third_party/deep_gemm/", "/static/")
_CUT = ("_C.abi3.so", "_C_stable_libtorch.abi3.so", "_moe_C.abi3.so")
_FLASH_ATTENTION = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
_GLIBC = (34, 31, 28, 27, 26, 24, 17)  # 2.x: wheels for these may be taken

_SHIM = '''"""What nano-vllm calls of flash-attn, done by the FlashAttention 3 that vLLM brings."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_FOLDER = Path(find_spec("vllm").submodule_search_locations[0])
torch.ops.load_library(str(_FOLDER / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"))


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal,
    block_table=None,
):
    keys = (cu_seqlens_k, None) if block_table is None else (None, cu_seqlens_k.diff())
    rows = (cu_seqlens_q, *keys, max_seqlen_q, max_seqlen_k, block_table)
    return _forward(q, k, v, *rows, softmax_scale, causal)


def flash_attn_with_kvcache(q, k, v, cache_seqlens, block_table, softmax_scale, causal):
    """`q` has one token for each row."""
    longest = block_table.shape[1] * k.shape[1]
    rows = (_ends(len(q), q.device), None, cache_seqlens, 1, longest, block_table)
    return _forward(q.squeeze(1), k, v, *rows, softmax_scale, causal).unsqueeze(1)


@cache
def _ends(num_rows, device):
    return torch.arange(num_rows + 1, dtype=torch.int32, device=device)


def _forward(q, k, v, ends_q, ends_k, used_k, longest_q, longest_k, block_table, scale, causal):
    return torch.ops._vllm_fa3_C.fwd(
        q, k, v,
        None, None, None,  # new keys, new values, q_v
        None,  # out: one is made
        ends_q, ends_k, None,  # and those of new keys
        None, used_k,  # of queries, of keys
        longest_q, longest_k, block_table,
        None, None,  # kv_batch_idx, leftpad_k
        None, None, None,  # cosines, sines and lengths of a rotation
        None, None, None,  # factors of 8-bit q, k and v
        scale, causal,
        -1, -1, 0.0, True,  # no window, no soft cap, rotation in pairs
        None, 0, None, 0,  # schedule, splits, packed heads: automatic; no SM left free
        None, 1, 0, None,  # no sinks, no context parallelism
    )[0]
'''


_SETUP = """#!/usr/bin/env bash
# bash setup.sh DEST: unpacks vLLM, nano-vllm and what they need into the folder DEST.
# It may run twice at a time: the second waits for the first.
set -euo pipefail
dest=${1:?usage: bash setup.sh DEST}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$dest"
exec 9>"$dest.lock"
flock 9
[ ! -e "$dest/.complete" ] || exit 0
jobs=()
for archive in "$here"/*.tar.xz; do
    python3 -W ignore -m tarfile -e "$archive" "$dest" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
# Modules that are imported later would otherwise be compiled then, file by file.
late="vllm openai pydantic xgrammar tvm_ffi nano"
(cd "$dest" && python3 -m compileall -q -j 0 $late >/dev/null) || true
mkdir -p ~/.cache/vllm/modelinfos
cp "$here"/modelinfos/*.json ~/.cache/vllm/modelinfos/
touch "$dest/.complete"
"""
_MODEL = "vllm-model_executor-models-qwen3-Qwen3ForCausalLM"
_MODEL_INFO = {  # of vLLM 0.22, in its order
    "architecture": "Qwen3ForCausalLM",
    "is_text_generation_model": True,
    "is_pooling_model": False,
    "attn_type": "decoder",
    "default_seq_pooling_type": "LAST",
    "default_tok_pooling_type": "ALL",
    "score_type": "bi-encoder",
    "supports_multimodal": False,
    "supports_multimodal_raw_input_only": False,
    "requires_raw_input_tokens": False,
    "supports_multimodal_encoder_tp_data": False,
    "supports_pp": True,
    "has_inner_state": False,
    "is_attention_free": False,
    "is_hybrid": False,
    "has_noops": False,
    "supports_mamba_prefix_caching": False,
    "supports_transcription": False,
    "supports_transcription_only": False,
}


class Entry(NamedTuple):
    """One program of a fat binary, as a range of bytes of the file."""

    start: int
    end: int
    kind: int  # 1 is PTX, 2 machine code
    arch: int


def entries(data: bytes | bytearray) -> Iterator[Entry]:
    """Return all programs of NVIDIA's compiler in a library, without their headers.

    A fat binary: magic number, version, bytes of this header, bytes of what follows. An entry:
    kind, version, bytes of this header, bytes of the program, 12 others, architecture.
    """
    start = 0
    while (start := data.find(b"\x50\xed\x55\xba", start)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, start)
        if (version, header) != (1, 16):
            start += 4
            continue
        start, end = start + header, start + header + size
        while start < end:
            kind, _, header, size, arch = struct.unpack_from("<HHIQ12xI", data, start)
            start += header + size
            yield Entry(start - size, start, kind, arch)


def cut(library: Path, arch: int) -> None:
    """Overwrite programs for other GPUs with zeros."""
    data = bytearray(library.read_bytes())
    found = list(entries(data))
    kept = [entry for entry in found if (entry.kind, entry.arch) == (2, arch)]
    if not kept:
        raise ValueError(f"{library.name} has no machine code for sm_{arch}")
    for start, end, _, _ in set(found) - set(kept):
        data[start:end] = bytes(end - start)
    library.write_bytes(data)
    print(f"{library.name}: {len(kept)} of {len(found)} programs are for sm_{arch}")


def _pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments, "--no-deps"], check=True)


def _for_python(version: str) -> list[str]:
    """Download wheels for that machine, independent of this one."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms.append("--platform=manylinux2014_x86_64")
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *platforms]


def _unpack_vllm(scratch: Path, tree: Path, args: Namespace) -> None:
    _pip("download", "--dest", scratch, *_for_python(args.python), _VLLM)
    with ZipFile(next(scratch.glob("vllm-*.whl"))) as archive:
        names = [name for name in archive.namelist() if not any(part in name for part in _LEFT_OUT)]
        archive.extractall(tree, names)
    for name in _CUT:
        cut(tree / "vllm" / name, args.arch)


def _pack(archive: Path, tree: Path, files: list[Path]) -> str:
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        for file in files:
            packed.add(file, file.relative_to(tree), recursive=False)
    return f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB of {len(files)} files"


def write_setup(tree: Path, out: Path) -> None:
    """Write the script of the other machine, and the file that saves vLLM a second Python."""
    (out / "setup.sh").write_text(_SETUP)
    source = (tree / "vllm/model_executor/models/qwen3.py").read_bytes()
    digest = hashlib.md5(source, usedforsecurity=False).hexdigest()  # the one that vLLM checks
    (out / "modelinfos").mkdir(exist_ok=True)
    info = json.dumps({"hash": digest, "modelinfo": _MODEL_INFO}, indent=2)
    (out / "modelinfos" / f"{_MODEL}.json").write_text(info)


def pack(args: Namespace, scratch: Path) -> None:
    tree = scratch / "tree"
    _pip("install", "--no-compile", "--target", tree, *_for_python(args.python), *_PACKAGES.split())
    _pip("install", "--no-compile", "--target", tree / "nano", args.nano_vllm)
    shutil.rmtree(tree / "bin", ignore_errors=True)
    (tree / "nano" / "flash_attn").mkdir()
    (tree / "nano" / "flash_attn" / "__init__.py").write_text(_SHIM)
    _unpack_vllm(scratch, tree, args)
    flash, *cuts = (tree / "vllm" / name for name in (_FLASH_ATTENTION, *_CUT))
    parts = {"flash-attention-3": [flash], "libraries": cuts}
    files = [file for file in sorted(tree.rglob("*")) if file.is_file()]
    parts["python"] = [file for file in files if file not in (flash, *cuts)]
    args.out.mkdir(parents=True, exist_ok=True)
    write_setup(tree, args.out)
    archives = [args.out / f"{name}.tar.xz" for name in parts]
    with ThreadPoolExecutor() as threads:
        print(*threads.map(_pack, archives, [tree] * len(parts), parts.values()), sep="\n")
    print(f"{sum(archive.stat().st_size for archive in archives) / 2**20:.1f} MiB in all")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the archives")
    parser.add_argument("--nano-vllm", default=_NANO_VLLM, help="or the folder of a checkout")
    parser.add_argument("--arch", type=int, default=90, help="90 is Hopper")
    parser.add_argument("--python", default="3.12", help="version there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pack(args, Path(scratch))


if __name__ == "__main__":
    main()
