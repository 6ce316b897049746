"""The kernels compile for GPUs that are not there, and use no more of them than there is."""

import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("triton")
if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
    pytest.skip("triton brings its compiler for Linux only", allow_module_level=True)

import compile_kernels
from compile_kernels import CASES, SHARED_KIB

SCRIPT = compile_kernels.__file__
# Every case for one of them, the usual ones for the others; `compile_kernels.py 80` compiles all.
USUAL = r"bfloat16.*(head_dim=128|vocab=151936|hidden=(256|1024)|size=3072)"
# Where there is less shared memory, also those that take the most of it.
LARGE = rf"{USUAL}|attention \w+ (head_dim=128 heads=4:2 prefill|head_dim=256 heads=4:2 (pre|dec))"
# Up to so many bytes are spilled there: by the merge of splits, and by prefill with a window.
SPILLS = {86: 8, 89: 8, 120: 88}
WANTED = {80: USUAL, 86: LARGE, 89: LARGE, 90: "", 100: USUAL, 120: LARGE}
# At the small size, a case or two for each kernel.
EACH = "|".join(
    [
        r"attention bfloat16 head_dim=128 heads=8:1",
        r"bfloat16 tokens=1024 hidden=256",
        r"norm bfloat16 hidden=(1024|4096)",
        r"bfloat16 size=3072 silu",
        r"bfloat16 tokens=256 head_dim=128 norm=True",
        r"bfloat16 vocab=151936 filtered=True",
    ]
)

LARGEST = r"attention bfloat16 head_dim=256 heads=4:2 prefill"

Records = list[dict[str, Any]]


def compile_for(capability: int, wanted: str) -> Records:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, SCRIPT, str(capability), wanted]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


@pytest.fixture(scope="module")
def wanted(full_size: bool) -> dict[int, str]:
    """The cases that are compiled for each capability."""
    return WANTED if full_size else {89: LARGEST, 90: EACH}


@pytest.fixture(scope="module")
def records(wanted: dict[int, str]) -> dict[int, Records]:
    with ThreadPoolExecutor(max_workers=2) as processes:
        compiled = processes.map(compile_for, wanted.keys(), wanted.values())
        return dict(zip(wanted, compiled, strict=True))


@pytest.mark.small(capability=[89, 90])
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_case_compiles(
    records: dict[int, Records], wanted: dict[int, str], capability: int
) -> None:
    errors = [record for record in records[capability] if "error" in record]
    assert not errors
    labels = {label for label, _ in CASES if re.search(wanted[capability], label)}
    assert len(labels) >= {EACH: 10, LARGEST: 1}.get(wanted[capability], 20)
    assert {record["case"] for record in records[capability]} == labels


def test_the_small_size_has_a_case_of_each_kernel(records: dict[int, Records]) -> None:
    kernels = {record["kernel"] for record in records[90]}
    small = {r["kernel"] for r in records[90] if re.search(EACH, r["case"])}
    assert small == kernels and len(kernels) >= 10


@pytest.mark.small(capability=[89, 90])
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_fit_into_registers_and_shared_memory(
    records: dict[int, Records], capability: int
) -> None:
    compiled = [record for record in records[capability] if "error" not in record]
    print(f"\nregisters  spills  shared  on sm_{capability}")  # shown with -s, or on failure
    for record in compiled:
        numbers = "{registers:9}  {spill_bytes:6}  {shared_bytes:6}".format(**record)
        print(f"{numbers}  {record['kernel']}: {record['case']}")
    for record in compiled:
        assert record["shared_bytes"] <= SHARED_KIB[capability] * 1024, record
        if "head_dim=256" not in record["case"]:  # there, half as many rows would cost more
            assert record["spill_bytes"] <= SPILLS.get(capability, 0), record
