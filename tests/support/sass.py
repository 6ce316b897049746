"""What the machine code (SASS) of a kernel consists of, by the disassembler in Triton's wheel.

An instruction is known by its name with all that modifies it: LDG.E.128 loads 16 bytes for each
thread, LDGSTS.E.BYPASS.128 too, straight into shared memory and without waiting.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # 4 where nothing is said


def disassembler() -> Path | None:
    """Not every wheel has one."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return path if path.exists() else None


def disassemble(cubin: bytes) -> dict[str, Any]:
    """How many instructions of each name there are, see `count_instructions`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler(), "-c", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return count_instructions(shown.stdout)


def count_instructions(sass: str) -> dict[str, Any]:
    """Return a counter of "all" and one of what is in "loops", and a list of the "innermost" ones'.

    A loop is what lies between a label and a branch back to it.
    """
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: list[range] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := _INSTRUCTION.match(line):
            name, operands = instruction.group(2, 3)
            target = re.search(r"\((\.L_x_\d+)\)", operands)
            if name.startswith("BRA") and target and target[1] in labels:
                loops.append(range(labels[target[1]], len(names)))
            names.append(name)
    in_loops = {index for loop in loops for index in loop}
    loops = [loop for loop in loops if loop]  # behind the end, a branch to itself
    innermost = [a for a in loops if not any(a != b and b[0] in a and b[-1] in a for b in loops)]
    return {
        "all": Counter(name for name in names if name != "NOP"),
        "loops": Counter(names[index] for index in sorted(in_loops)),
        "innermost": [Counter(names[index] for index in loop) for loop in innermost],
    }


def number_of(instructions: dict[str, int], opcode: str) -> int:
    """However they are modified."""
    return sum(n for name, n in instructions.items() if name.split(".")[0] == opcode)


def bytes_loaded(instructions: dict[str, int]) -> Counter[int]:
    """By the width of a load from global memory: the bytes that all loads of that width bring."""
    loaded: Counter[int] = Counter()
    for name, count in instructions.items():
        opcode, *modifiers = name.split(".")
        if opcode in ("LDG", "LDGSTS"):
            width = next((_BYTES[m] for m in modifiers if m in _BYTES), 4)
            loaded[width] += width * count
    return loaded
