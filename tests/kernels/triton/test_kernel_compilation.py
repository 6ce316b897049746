"""The kernels compile for GPUs that are not there, and use no more of them than there is."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
    pytest.skip("triton brings its compiler for Linux only", allow_module_level=True)

import compile_kernels
from compile_kernels import CASES, SHARED_KIB
from sass import bytes_loaded, count_instructions, disassembler, number_of

SCRIPT = compile_kernels.__file__
# With --soak: every case for one GPU, the usual ones for the others. `compile_kernels.py 80`
# compiles all for another.
USUAL = "|".join(
    [
        r"attention bfloat16 head_dim=128 heads=(8:1|4:2 (sliding_window soft_cap|kv=fp8))",
        r"^latent bfloat16",
        r"(experts|norm) bfloat16.* hidden=(256|1024)|experts of",
        r"store_kv bfloat16.* head_dim=128",
        r"bfloat16 (vocab=151936|size=3072)",
        r"scaled_product int8 .*=4096",
        r"^low_rank bfloat16",
        r"grouped_product (int|e4m3).* (offset=False rows=64|float16 .*rows=1) ",
        r"grouped_product int4 (bfloat16|float32) group=32 offset=True",
    ]
)
E4M3 = r"e4m3"  # a tensor core's from compute capability 8.9 on
# Where there is less shared memory, also those that take the most of it.
LARGE = r"attention \w+ (head_dim=128 heads=4:2 prefill|head_dim=256 heads=4:2 (pre|dec))"
LARGE = rf"{LARGE}|(scaled|grouped)_product int.* rows=(1|1024) "
WANTED = {
    80: USUAL,
    86: LARGE,
    89: rf"{USUAL}|{LARGE}|{E4M3}",
    90: "",
    100: rf"{USUAL}|{E4M3}",
    120: rf"{LARGE}|{E4M3}",
}
# With --full, a case or two for each kernel, and the largest where there is least room.
EACH = "|".join(
    [
        r"attention bfloat16 head_dim=128 heads=(8:1|4:2 kv=fp8)",
        r"^latent bfloat16 heads=(16 kv=None|128 kv=fp8)",
        r"bfloat16 tokens=1024 hidden=256",
        r"norm bfloat16 hidden=(1024|4096)",
        r"bfloat16 size=3072 silu",
        r"bfloat16 tokens=256 head_dim=128 (norm=True|kv=int8)",
        r"bfloat16 vocab=151936 filtered",
        r"dependent",
        r"^fused \w+ \w+ bfloat16",
        r"^low_rank \w+ inputs=1024",
        r"split_linear bfloat16 rows=(1|64|256) inputs=(1024|2048)|tiled_linear bfloat16",
        r"scaled_product (int8|e4m3) rows=1024 inputs=4096",
        r"scaled_product int8 group=32 rows=(1|1024) inputs=4096",
        r"quantize_rows int8 bfloat16 (group=32 )?largest=True",
        r"grouped_product (int8|e4m3) bfloat16 group=4096 offset=False rows=1024 ",
        r"grouped_product int4 bfloat16 group=32 offset=True rows=(1|1024) ",
    ]
)
LARGEST = r"attention bfloat16 head_dim=256 heads=4:2 prefill|scaled_product int8.* rows=1024"
# Kernels that `kernel_config` or `batch_invariant` chooses; what is counted is of the default ones.
VARIANTS = r"^dependent |^fused |^low_rank |^tiled_linear | merging$| in order$"
# At the small size, what every step of decoding runs, for one GPU.
FEW = "|".join(
    [
        r"attention bfloat16 head_dim=128 heads=8:1 decode",
        r"store_kv bfloat16 tokens=256 head_dim=128 norm=True",
        r"choose_tokens bfloat16 vocab=151936 filtered=False",
    ]
)
# The larger GPU first: tiles that were chosen for it and kept would not fit the smaller one.
SMALL, FULL = {90: FEW}, {90: EACH, 89: LARGEST}

# What the machine code for an H100 must be, of the cases in EACH, or of FEW. All loads of K and V
# are as wide as can be; what else is loaded in their loops, block tables, is a small part of the
# bytes.
WIDE_SHARE = 0.9
# Of one warp; of four together.
TENSOR_CORES = {"decode": "HMMA", "few": "HGMMA", "prefill": "HGMMA"}
QUERY_BYTES = {"decode": 16, "few": 64, "prefill": 0}  # of a thread
# Case -> kernel, and the 16-byte loads of a thread: inputs over threads, no more and no less.
WIDE_LOADS = {
    "add_rms_norm bfloat16 hidden=1024": ("_add_rms_norm", 3),
    "rms_norm bfloat16 hidden=4096, float32 weight": ("_add_rms_norm", 3),
    "act_and_mul bfloat16 size=3072 silu": ("_act_and_mul", 2),
    "choose_tokens bfloat16 vocab=151936 filtered=True": ("_best_of_parts", 2),
    "choose_tokens bfloat16 vocab=151936 filtered=False": ("_best_of_parts", 2),
}
SAMPLER_INSTRUCTIONS = 60  # of a token of the vocabulary, hash, noise and comparison

# Of attention over codes: the instruction that unpacks, and what it unpacks at once.
CODES = {"int8": (r"HADD2|HFMA2", 2), "fp8": (r"F2FP\.F16\.E4M3", 2)}
# Cases of theirs -> keys of a tile, threads, and a warp's instructions at most for 64 keys.
CODE_LOOPS = {
    ("int8", "decode"): (128, 128, 600),
    ("int8", "few"): (64, 256, 820),  # a tile of 64 queries
    ("fp8", "decode"): (128, 128, 500),
    ("fp8", "few"): (128, 128, 500),
}

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def wanted(by_size: Callable[..., Any]) -> dict[int, str]:
    """The cases that are compiled for each capability."""
    return by_size(SMALL, FULL, WANTED)


@pytest.fixture(scope="module")
def records(wanted: dict[int, str]) -> dict[int, Records]:
    """What the script prints, in one process for all capabilities."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, SCRIPT]
    for capability, cases in wanted.items():
        is_disassembled = capability == 90 and disassembler() is not None
        command += [str(capability), cases, *[EACH] * is_disassembled]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    printed = [json.loads(line) for line in shown.stdout.splitlines()]
    return {c: [record for record in printed if record["arch"] == f"sm_{c}"] for c in wanted}


@pytest.mark.small(capability=SMALL)
@pytest.mark.full(capability=FULL)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_case_compiles(
    records: dict[int, Records], wanted: dict[int, str], capability: int
) -> None:
    errors = [record for record in records[capability] if "error" in record]
    assert not errors
    labels = {label for label, _ in CASES if re.search(wanted[capability], label)}
    assert len(labels) >= {FEW: 3, EACH: 8, LARGE: 6, LARGEST: 1}.get(wanted[capability], 20)
    assert {record["case"] for record in records[capability]} == labels


@pytest.mark.size("full")
def test_the_full_size_has_a_case_of_each_kernel(records: dict[int, Records]) -> None:
    """Of those that --soak compiles; --full compiles no others."""
    kernels = {record["kernel"] for record in records[90]}
    full = {r["kernel"] for r in records[90] if re.search(EACH, r["case"])}
    assert full == kernels and len(kernels) >= 10


@pytest.mark.small(capability=SMALL)
@pytest.mark.full(capability=FULL)
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
            # A few registers, where ptxas chooses to use fewer: one of 8-bit caches, outside of the
            # loop over keys; eight of the products whose weights become floats in registers.
            most = 4 if "kv=" in record["case"] else 0
            most = 32 if "grouped_product" in record["case"] else most
            # Two of those with two results in registers, outside of the loop, too.
            most = 8 if record["case"].endswith("in order") else most
            assert record["spill_bytes"] <= most, record


# What kernels that were written to be dependent read before they wait: lengths, weights, nothing.
BEFORE_WAIT = {
    "decode_attention_kernel": {"ld.global.b32"},
    "merge_parts_kernel": {"ld.global.b32"},
    "_add_rms_norm": {"ld.global.v4.b32"},
    "_act_and_mul": set(),
    "_store_kv": set(),
    "_filter_borders": set(),
    "_best_of_parts": set(),
    "_best_part": set(),
    "_split_linear": set(),
    "_shrink": set(),
    "_expand": set(),
    "_scaled_product": set(),
    "_quantize_rows": set(),
    "_quantize_groups": set(),
    "_grouped_product": set(),
    "_sum_parts": set(),
    "_sort_kernel": set(),
    "_product_kernel": set(),
    "_sum_kernel": set(),
}


def test_dependent_kernels_read_nothing_but_lengths_and_weights_before_they_wait(
    records: dict[int, Records], by_size: Callable[..., Any]
) -> None:
    """And end not before, either. No interpreter has a kernel before to wait for."""
    dependent = [record for record in records[90] if record.get("is_dependent")]
    names = {record["kernel"] for record in dependent}
    assert names == {*by_size([*BEFORE_WAIT][:2], BEFORE_WAIT)}
    for record in dependent:
        assert set(record["before_wait"]) == BEFORE_WAIT[record["kernel"]], record
    small = {record["case"] for record in dependent if "attention" not in record["case"]}
    assert all(case.startswith("dependent") for case in small)  # only where it is asked for
    for capability, older in records.items():  # from --full on, one at least is older
        if capability < 90:
            assert older and not any(record.get("is_dependent") for record in older)


@pytest.mark.size("full")
def test_who_merges_has_seen_what_others_have_stored(records: dict[int, Records]) -> None:
    """All threads have stored before one of them counts, and no L1 cache has an older value."""
    found = [record for record in records[90] if record.get("arrival")]
    for record in found:
        arrival = record["arrival"]
        assert arrival["atomic"] == "atom.global.gpu.acq_rel.add.u32", record
        assert arrival["has_barrier"] and arrival["loads"], record  # of the L2 cache
    merging = {record["case"] for record in found if record["kernel"] != "_split_linear"}
    assert merging == {r["case"] for r in records[90] if r["case"].endswith(" merging")}
    assert len(merging) >= 4 and len(found) >= len(merging) + 4


@pytest.fixture(scope="module")
def disassembled(records: dict[int, Records]) -> Records:
    if disassembler() is None:
        pytest.skip("this Triton's wheel has no nvdisasm")
    return [
        record
        for record in records[90]
        if "instructions" in record and not re.search(VARIANTS, record["case"])
    ]


@pytest.mark.small(kind=["decode"])
@pytest.mark.parametrize("kind", TENSOR_CORES)
def test_keys_and_values_come_16_bytes_at_a_time_and_go_to_the_tensor_cores(
    disassembled: Records, kind: str
) -> None:
    loops = [
        record["instructions"]["loops"]
        for record in disassembled
        if re.search(rf"attention .* {kind}", record["case"]) and "kv=" not in record["case"]
    ]
    products = [
        loop for loop in loops if any(name.startswith(TENSOR_CORES[kind] + ".") for name in loop)
    ]
    assert products, loops
    for loop in products:  # other kernels put parts together
        loaded = bytes_loaded(loop)
        assert loaded[16] >= WIDE_SHARE * sum(loaded.values()) > 0, loop
        asynchronous = sum(n for name, n in loop.items() if re.match(r"LDGSTS.*\.128", name))
        # All but the queries of a row, where a loop over rows is around that over keys.
        assert loaded[16] - 16 * asynchronous == QUERY_BYTES[kind], loop


def loops_over_keys(disassembled: Records, case: str) -> list[dict[str, int]]:
    """What is in the innermost loops with products of attention's only such case."""
    (code,) = (
        record["instructions"]
        for record in disassembled
        if re.search(rf"attention .*{case}", record["case"])
        and record["kernel"] != "merge_parts_kernel"
    )
    return [loop for loop in code["innermost"] if any("MMA" in name for name in loop)]


@pytest.mark.size("full")
def test_scores_are_scaled_in_the_instruction_that_takes_the_maximum_off(
    disassembled: Records,
) -> None:
    """What is multiplied for itself are the sums so far: 128 x 128 of them, by 256 threads."""
    loops = loops_over_keys(disassembled, "heads=8:1 prefill")
    assert len(loops) == 2  # without masks, and with
    for loop in loops:
        assert number_of(loop, "MUFU") >= 32, loop  # a power of 2 for each of 128 x 64 scores
        assert 64 <= number_of(loop, "FMUL") < 64 + 32, loop


@pytest.mark.size("full")
@pytest.mark.parametrize(("kv_cache_dtype", "kind"), CODE_LOOPS)
def test_codes_take_few_instructions(disassembled: Records, kv_cache_dtype: str, kind: str) -> None:
    """Of a warp, for 64 keys, which an H100's memory brings in 1,306 of its cycles. Before codes
    were multiplied as they are, it was 1,226 for int8, and 1,999 for e4m3."""
    shape = "4:2" if kv_cache_dtype == "fp8" else "8:1"
    (loop,) = loops_over_keys(disassembled, f"heads={shape} kv={kv_cache_dtype} {kind}")
    num_keys, num_threads, most = CODE_LOOPS[kv_cache_dtype, kind]
    assert sum(loop.values()) <= most * num_keys / 64, loop
    # K's and V's codes of a tile, and with them that it has so many keys.
    converts, num_converted = CODES[kv_cache_dtype]
    wanted = 2 * num_keys * 128 / num_threads / num_converted
    assert sum(n for name, n in loop.items() if re.match(converts, name)) == wanted, loop
    assert not any(re.match(r"(I2F|F2F)\.|LDL|STL", name) for name in loop), loop
    bytes_alone = sum(n for name, n in loop.items() if re.match(r"LDS\.U?[SU]8", name))
    assert bytes_alone == 0, loop  # V's codes from shared memory, one by one


@pytest.mark.size("full")
@pytest.mark.parametrize("kind", TENSOR_CORES)
def test_codes_come_many_at_a_time_too(disassembled: Records, kind: str) -> None:
    """8 or 16 bytes; what else is loaded are 4 bytes of a table or a scale."""
    (loop,) = (
        record["instructions"]["loops"]
        for record in disassembled
        if re.search(rf"attention .* kv=int8 {kind}", record["case"])
        and record["kernel"] != "merge_parts_kernel"
    )
    loaded = bytes_loaded(loop)
    assert loaded[16] + loaded[8] > 2 * loaded[4] > 0 and loaded.keys() <= {4, 8, 16}, loop
    assert any(name.startswith(TENSOR_CORES[kind] + ".") for name in loop), loop


@pytest.mark.small(case=["choose_tokens bfloat16 vocab=151936 filtered=False"])
@pytest.mark.parametrize("case", WIDE_LOADS)
def test_norm_gate_and_sampler_load_16_bytes_at_a_time(disassembled: Records, case: str) -> None:
    kernel, num_loads = WIDE_LOADS[case]
    (code,) = (
        r["instructions"]["all"] for r in disassembled if (r["case"], r["kernel"]) == (case, kernel)
    )
    loaded = bytes_loaded(code)
    assert loaded[16] == 16 * num_loads, code
    assert not {1, 2} & loaded.keys(), code


@pytest.mark.size("full")
@pytest.mark.parametrize(
    ("case", "instruction"),
    [
        ("scaled_product int8 rows=1024 inputs=4096", "IGMMA"),  # of four warps together
        ("scaled_product int8 group=32 rows=1024 inputs=4096", "IGMMA"),
        ("scaled_product e4m3 rows=1024 inputs=4096", "QGMMA"),
        ("grouped_product int8 bfloat16 group=4096 offset=False rows=1024 inputs=4096", "HGMMA"),
        ("grouped_product int4 bfloat16 group=32 offset=True rows=1024 inputs=4096", "HGMMA"),
        ("grouped_product int4 bfloat16 group=32 offset=True rows=1 inputs=4096", "[HW]G?MMA"),
    ],
)
def test_quantized_products_go_to_the_tensor_cores(
    disassembled: Records, case: str, instruction: str
) -> None:
    loop = next(
        r["instructions"]["loops"]
        for r in disassembled
        if r["case"] == case and r["kernel"] != "_sum_parts"
    )
    assert any(re.match(rf"{instruction}\.", name) for name in loop), loop
    loaded = bytes_loaded(loop)
    assert loaded[16] + loaded[8] >= 0.75 * sum(loaded.values()) > 0, loop  # the rest are scales


@pytest.mark.size("full")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapters_are_loaded_many_numbers_at_a_time(
    records: dict[int, Records], dtype: str
) -> None:
    """Also where their ranks and outputs end, which is data. float32 is multiplied as float32."""
    if disassembler() is None:
        pytest.skip("this Triton's wheel has no nvdisasm")
    codes = {
        record["kernel"]: record["instructions"]
        for record in records[90]
        if record["case"].startswith(f"low_rank {dtype} inputs=1024")
    }
    assert codes.keys() == {"_shrink", "_expand"}
    for code in codes.values():
        names, loaded = code["all"], bytes_loaded(code["all"])
        assert any(name.startswith("HMMA.") for name in names) is (dtype == "bfloat16"), names
        assert loaded[16] > 0 and not {1, 2} & loaded.keys(), names  # 4: of tiles and of narrow
        stores = {name for name in names if name.startswith("STG.")}
        assert stores and all(name.endswith(".128") for name in stores), stores
    loaded = bytes_loaded(codes["_shrink"]["all"])
    assert loaded[16] > 0.9 * sum(loaded.values())


def test_the_sampler_has_few_instructions_for_each_token(disassembled: Records) -> None:
    codes = [r["instructions"]["all"] for r in disassembled if r["kernel"] == "_best_of_parts"]
    assert codes
    for code in codes:
        tokens_of_a_thread = bytes_loaded(code)[16] / 2
        assert sum(code.values()) <= SAMPLER_INSTRUCTIONS * tokens_of_a_thread, code


def test_nothing_lies_in_local_memory(disassembled: Records, by_size: Callable[..., Any]) -> None:
    """Which is global memory by another name: for what is spilled, and for indexed arrays."""
    assert len({record["kernel"] for record in disassembled}) >= by_size(4, 10)
    for record in disassembled:
        code = record["instructions"]
        # A number that each row takes once may lie there in kernels over codes.
        parts = code["innermost"] if "kv=" in record["case"] else [code["all"]]
        assert not [name for part in parts for name in part if re.match("LDL|STL", name)], record


@pytest.mark.size("full")
@pytest.mark.parametrize("kind", ["8:1", "8:1 kv=int8", "4:2 kv=fp8"])
def test_shares_in_one_program_and_in_many_are_computed_alike(
    records: dict[int, Records], kind: str
) -> None:
    """No product is rounded in one of the forms only, so bits do not depend on the choice."""
    if disassembler() is None:
        pytest.skip("this Triton's wheel has no nvdisasm")
    label, kernel = f"attention bfloat16 head_dim=128 heads={kind}", "in_order_attention_kernel"
    loops = [
        {name: n for name, n in loop.items() if re.match(r"F|H\w*MMA|MUFU|SHFL", name)}
        for form in ("in order", "shares in order")
        for record in records[90]
        if record["case"] == f"{label} {form}" and record["kernel"] == kernel
        for loop in record["instructions"]["innermost"]
    ]
    loops = [loop for loop in loops if loop]  # not the search of a row
    assert len(loops) == 2 and loops[0] == loops[1]
    assert any(re.match(r"H\w*MMA", name) for name in loops[0])


def test_loops_are_found_in_the_machine_code() -> None:
    sass = """
        /*0000*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16 R9, desc[UR4][R2.64] ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*0060*/                   EXIT ;
        /*0070*/                   NOP ;
"""
    counted = count_instructions(sass)
    assert counted["innermost"] == [counted["loops"]]
    assert number_of(counted["all"], "LDG") == 3 and number_of(counted["all"], "LDGSTS") == 1
    assert sum(counted["all"].values()) == 7 and counted["loops"]["EXIT"] == 0
    assert bytes_loaded(counted["loops"]) == {16: 32, 2: 2}
    assert bytes_loaded(counted["all"]) == {16: 32, 2: 2, 4: 4}
