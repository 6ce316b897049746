"""Worked numbers of the attention kernels: traffic, online softmax, shares, addresses, and GPUs."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """Keys processed together: one query's scores for them, and a number as each value."""

    scores: tuple[float, ...]
    values: tuple[float, ...]


class State(NamedTuple):
    """The state of the online softmax over all scores so far."""

    maximum: float
    total: float  # of exp(score - maximum)
    acc: float  # of exp(score - maximum) * value


class Part(NamedTuple):
    """The result of one of several programs."""

    out: float
    lse: float  # log of the sum of exp(score)


class Gpu(NamedTuple):
    """Data of a GPU from NVIDIA's white papers and data sheets, for the SXM form with 80 GB."""

    name: str
    multiprocessors: int
    flops_a_clock: int  # of the tensor cores of one multiprocessor, in 16 bits, without sparsity
    tensor_mhz: int
    mhz: int
    shared_kib: int  # of one multiprocessor, shared by all programs on it
    l2_mb: int
    memory_gb: int
    memory_gb_per_second: int
    host_gb_per_second: float  # one direction through 16 lanes of PCIe, generation 4 or 5


GPUS = {
    "A100": Gpu("A100", 108, 2048, 1410, 1410, 164, 40, 80, 2039, 31.5),
    "H100": Gpu("H100", 132, 4096, 1830, 1980, 228, 50, 80, 3350, 63.0),
}
REGISTERS = 65_536  # of 32 bits, of one multiprocessor; the same on A100, H100 and B200
MOST_WARPS = 64  # at a time on one multiprocessor
SHARED_BYTES_A_CLOCK = 128  # of one multiprocessor: 32 banks of 4 bytes
SECTOR = 32  # bytes, the smallest unit of a read from memory

TILES = (Tile((1.0, 3.0), (10.0, 20.0)), Tile((2.0, 5.0), (30.0, 40.0)))


def score_bytes(tokens: int, heads: int, dtype_bytes: int) -> int:
    """Return the bytes of the score matrices [heads, tokens, tokens] of one layer."""
    return heads * tokens * tokens * dtype_bytes


def qkvo_bytes(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes of q, k, v and the output of one layer's attention."""
    return tokens * (2 * heads + 2 * kv_heads) * head_dim * dtype_bytes


def kv_bytes(rows: int, context: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes of K and V that the decode rows of one step read in one layer."""
    return rows * context * 2 * kv_heads * head_dim * dtype_bytes


def decode_intensity(group: int, dtype_bytes: int) -> float:
    """Return operations per byte of K and V, when `group` query heads share one read.

    A key costs head_dim multiplications and additions for its score, its value as many again.
    """
    return group * 4 / (2 * dtype_bytes)


def exact(tiles: Sequence[Tile] = TILES) -> float:
    """Return the mean of the values, weighted by a softmax over all scores in two passes."""
    scores = [score for tile in tiles for score in tile.scores]
    values = [value for tile in tiles for value in tile.values]
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def online_states(tiles: Sequence[Tile] = TILES) -> list[State]:
    """Return the state after each tile (Milakov and Gimelshein 2018; Dao et al. 2022)."""
    state, states = State(-math.inf, 0.0, 0.0), []
    for tile in tiles:
        maximum = max(state.maximum, *tile.scores)
        rescale = math.exp(state.maximum - maximum)
        weights = [math.exp(score - maximum) for score in tile.scores]
        acc = sum(w * v for w, v in zip(weights, tile.values, strict=True))
        state = State(maximum, state.total * rescale + sum(weights), state.acc * rescale + acc)
        states.append(state)
    return states


def online_table(tiles: Sequence[Tile] = TILES) -> str:
    """Return `online_states` as Markdown."""
    lines = [
        "| tile | scores | values | rescale | maximum | sum | accumulated | accumulated / sum |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    before = -math.inf
    for i, (tile, state) in enumerate(zip(tiles, online_states(tiles), strict=True)):
        rescale, mean = math.exp(before - state.maximum), state.acc / state.total
        lines.append(
            f"| {i} | {_listed(tile.scores)} | {_listed(tile.values)} | {rescale:.4f} "
            f"| {state.maximum:g} | {state.total:.4f} | {state.acc:.4f} | {mean:.4f} |"
        )
        before = state.maximum
    return "\n".join(lines)


def parts(tiles: Sequence[Tile] = TILES) -> list[Part]:
    """Return the result of each tile on its own, each as a program of its own."""
    states = [online_states([tile])[0] for tile in tiles]
    return [Part(s.acc / s.total, s.maximum + math.log(s.total)) for s in states]


def merge(parts: Sequence[Part]) -> float:
    """Return the parts' mean, weighted by their sums of exponentials (Dao et al. 2023)."""
    largest = max(part.lse for part in parts)
    weights = [math.exp(part.lse - largest) for part in parts]
    return sum(w * part.out for w, part in zip(weights, parts, strict=True)) / sum(weights)


def plain_mean(parts: Sequence[Part]) -> float:
    """Return the wrong result of a merge without weights."""
    return sum(part.out for part in parts) / len(parts)


def parts_table(tiles: Sequence[Tile] = TILES) -> str:
    """Return `parts` and their weights as Markdown."""
    lines = ["| part | output | log-sum-exp | weight |", "|---|---:|---:|---:|"]
    found = parts(tiles)
    largest = max(part.lse for part in found)
    for i, part in enumerate(found):
        weight = math.exp(part.lse - largest)
        lines.append(f"| {i} | {part.out:.4f} | {part.lse:.4f} | {weight:.4f} |")
    return "\n".join(lines)


def tile_starts(lengths: Sequence[int], block_q: int) -> list[int]:
    """Return the first tile of each row, and the number of programs launched for one KV head.

    Row r starts at (tokens before it) // block_q + r, so no program counts the tiles of the rows
    before.
    """
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [end // block_q + i for i, end in enumerate(ends)]


def tiles_table(lengths: Sequence[int], block_q: int) -> str:
    """Return the row and tokens of each program, as Markdown."""
    starts = tile_starts(lengths, block_q)
    lines = ["| program | row | its tokens |", "|---|---|---|"]
    for row, (length, first, last) in enumerate(zip(lengths, starts, starts[1:], strict=False)):
        for tile in range(last - first):
            begin, end = tile * block_q, min(length, (tile + 1) * block_q) - 1
            tokens = f"{begin} to {end}" if begin < length else "none: it returns at once"
            lines.append(f"| {first + tile} | {row} | {tokens} |")
    return "\n".join(lines)


def key_tiles(context: int, chunk: int, block_q: int, tile_n: int) -> list[tuple[int, int]]:
    """Return for each program of a chunk the number of key tiles without masks, and with masks.

    The chunk is the end of the context. As in `chunk_attention_kernel` without a window.
    """
    tiles = []
    for begin in range(context - chunk, context, block_q):
        num_keys = min(context, begin + block_q)
        last = -(-num_keys // tile_n)
        plain = min((begin + 1) // tile_n, last)
        tiles.append((plain, last - plain))
    return tiles


def masked_percent(tokens: int, block_q: int, tile_n: int) -> float:
    """Return the percentage of tiles that need masks, over all programs of a whole prompt."""
    tiles = key_tiles(tokens, tokens, block_q, tile_n)
    masked = sum(masked for _, masked in tiles)
    return 100 * masked / (masked + sum(plain for plain, _ in tiles))


def num_programs(tokens: int, rows: int, block_q: int) -> int:
    """Return the programs that the host launches for one KV head, without the rows' lengths."""
    return rows + tokens // block_q


def shares(contexts: Sequence[int], tile_n: int, num_shares: int) -> list[list[tuple[int, int]]]:
    """Return the tiles of each share as (row, tile): all rows' tiles, divided into equal parts.

    As in `nanoserve.kernels.triton.decode_attention_kernels`.
    """
    tiles = [(row, i) for row, n in enumerate(contexts) for i in range(-(-n // tile_n))]
    size = -(-len(tiles) // num_shares)
    return [tiles[i * size : (i + 1) * size] for i in range(num_shares)]


def num_shares(multiprocessors: int, num_kv_heads: int, programs: int = 2) -> int:
    """Return the number of shares for `programs` programs per multiprocessor, one per KV head."""
    return programs * multiprocessors // num_kv_heads


def shares_table(contexts: Sequence[int], tile_n: int, count: int) -> str:
    """Return the tiles of each row in each share, as Markdown."""
    lines = ["| share | " + " | ".join(f"tiles of row {i}" for i in range(len(contexts))) + " |"]
    lines.append("|---" * (len(contexts) + 1) + "|")
    for share, tiles in enumerate(shares(contexts, tile_n, count)):
        cells = (_listed([i for row, i in tiles if row == r]) for r in range(len(contexts)))
        lines.append(f"| {share} | {' | '.join(cells)} |")
    return "\n".join(lines)


def longest_part(contexts: Sequence[int], tile_n: int, num_places: int) -> float:
    """Return the time with one program per row, relative to that of equal shares."""
    free_at = [0] * num_places
    for n in contexts:  # in order, each on the processor that is free first
        first = free_at.index(min(free_at))
        free_at[first] += -(-n // tile_n)
    return max(free_at) / (sum(free_at) / num_places)


def key_offset(
    block_table: Sequence[int],
    position: int,
    kv_head: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
) -> int:
    """Return the elements from the beginning of a layer's K to the key of a position.

    The layer's K is [num_blocks, kv_heads, block_size, head_dim], contiguous.
    """
    slot_stride = head_dim
    head_stride = block_size * slot_stride
    block_stride = kv_heads * head_stride
    block = block_table[position // block_size]
    return block * block_stride + kv_head * head_stride + position % block_size * slot_stride


def first_block_beyond_int32(kv_heads: int, block_size: int, head_dim: int) -> int:
    """Return the first block whose offset in elements does not fit into an int32."""
    return -(-(2**31) // (kv_heads * block_size * head_dim))


def tflops(gpu: str) -> float:
    """Return the rate of its tensor cores in 16 bits."""
    multiprocessors, flops, mhz = GPUS[gpu][1:4]
    return multiprocessors * flops * mhz / 1e6


def shared_tb_per_second(gpu: str) -> float:
    """Return the bandwidth of the shared memories of all multiprocessors together."""
    return GPUS[gpu].multiprocessors * SHARED_BYTES_A_CLOCK * GPUS[gpu].mhz / 1e6


def megabytes_within(gpu: str, microseconds: float) -> float:
    """Return what its memory delivers in that time."""
    return GPUS[gpu].memory_gb_per_second * microseconds / 1000


def kilobytes_under_way(gpu: str, microseconds: float) -> float:
    """Return the data that each multiprocessor must have in flight at this latency."""
    return megabytes_within(gpu, microseconds) * 1000 / GPUS[gpu].multiprocessors


def programs_at_once(gpu: str, registers: int, warps: int, shared_kib: float) -> int:
    """Return how many programs fit on a multiprocessor, by registers, shared memory and warps.

    A thread's registers are allocated in units of 8; a program takes one more KiB of shared memory.
    """
    by_registers = REGISTERS // (warps * 32 * (-(-registers // 8) * 8))
    by_shared = int(GPUS[gpu].shared_kib // (shared_kib + 1))
    return min(by_registers, by_shared, MOST_WARPS // warps, 32)


def occupancy(programs: int, warps: int) -> float:
    """Return the warps on a multiprocessor as a fraction of the maximum."""
    return programs * warps / MOST_WARPS


def bytes_for_a_warp(element_bytes: int, stride: int) -> int:
    """Return the bytes that memory delivers when 32 threads load elements `stride` apart.

    The first element lies at the beginning of a sector.
    """
    starts = [thread * stride * element_bytes for thread in range(32)]
    ends = [start + element_bytes - 1 for start in starts]
    return SECTOR * len({byte // SECTOR for byte in (*starts, *ends)})


def gpu_table() -> str:
    """Return the data of both GPUs as Markdown."""
    rows = [
        ("multiprocessors", lambda gpu: gpu.multiprocessors),
        ("registers of 32 bits per multiprocessor", lambda gpu: f"{REGISTERS:,}"),
        ("shared memory per multiprocessor", lambda gpu: f"{gpu.shared_kib} KiB"),
        ("warps per multiprocessor, at most", lambda gpu: MOST_WARPS),
        ("resident threads, at most", lambda gpu: f"{gpu.multiprocessors * 2048:,}"),
        ("tensor cores", lambda gpu: 4 * gpu.multiprocessors),
        ("operations per second in 16 bits, dense", lambda gpu: f"{tflops(gpu.name):.0f} TFLOP/s"),
        ("memory (HBM)", lambda gpu: f"{gpu.memory_gb} GB"),
        ("its bandwidth", lambda gpu: f"{gpu.memory_gb_per_second / 1000:.2f} TB/s"),
    ]
    lines = ["| | A100 | H100 |", "|---|---:|---:|"]
    lines += [f"| {name} | {of(GPUS['A100'])} | {of(GPUS['H100'])} |" for name, of in rows]
    return "\n".join(lines)


def memories_table() -> str:
    """Return sizes and bandwidths, A100 / H100, from the nearest memory to the furthest."""
    a100, h100 = GPUS.values()
    shared = " / ".join(f"{shared_tb_per_second(name):.1f}" for name in GPUS)
    memory = f"{a100.memory_gb_per_second / 1000:.2f} / {h100.memory_gb_per_second / 1000:.2f}"
    host = f"{a100.host_gb_per_second / 1000:.3f} / {h100.host_gb_per_second / 1000:.3f}"
    all_registers = [gpu.multiprocessors * REGISTERS * 4 / 2**20 for gpu in GPUS.values()]
    registers = " / ".join(f"{mib:.0f}" for mib in all_registers)
    rows = [
        ("registers", f"256 KiB per multiprocessor, {registers} MiB in all", "-", "one thread"),
        (
            "shared memory",
            f"{a100.shared_kib} / {h100.shared_kib} KiB per multiprocessor",
            shared,
            "the threads of one program",
        ),
        ("L2 cache", f"{a100.l2_mb} / {h100.l2_mb} MB", "7.2 / not published", "the whole GPU"),
        ("HBM", f"{a100.memory_gb} / {h100.memory_gb} GB", memory, "the whole GPU"),
        ("the host's memory", "depends on the machine", host, "the host; the GPU by copies"),
    ]
    lines = ["| memory | size | TB/s | accessible to |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
