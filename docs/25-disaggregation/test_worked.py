"""Chapter 25's numbers by hand, and the invariants of its simulation."""

import random
from functools import cache

import pytest

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_bytes_on_links() -> None:
    rows = {row[0]: row[1:] for row in cells(worked.transfer_table(2000))}
    # 2,000 x 131,072 bytes; / 50e9; 2 x 8.03e9 x 2,000 / 494.5e12
    assert rows["LLaMA-3.1-8B"][1:4:2] == ["262 MB", "5.2 ms"]
    assert rows["LLaMA-3.1-8B"][6:] == ["65 ms", "4.0 GB/s"]
    assert rows["DeepSeek-V3"][1] == "141 MB"  # 2,000 x 61 x 576 x 2
    assert worked.hidden_from("LLaMA-2-7B") == pytest.approx(524_288 * 494.5e12 / 2 / 6.74e9)
    assert worked.compute_seconds("LLaMA-2-70B", 1) == pytest.approx(2 * 68.98e9 / 4 / 494.5e12)


def test_a_tier_of_the_hosts_memory() -> None:
    rows = {row[0]: row[1:] for row in cells(worked.tier_table(2000))}
    assert rows["LLaMA-3.1-8B"] == ["5.2 ms", "65 ms", "12x"]
    assert worked.piece_bytes(contiguous=False) == 16 * 8 * 128 * 2 == 32_768
    assert worked.piece_bytes(contiguous=True) == 64 * 32_768


def test_times_of_steps_and_the_rate_of_a_link() -> None:
    assert worked.step_ms(1) == pytest.approx(16.06e9 / 3.35e12 * 1e3)  # reads the weights
    assert worked.step_ms(2048) == pytest.approx(2048 * 16.06e9 / 494.5e12 * 1e3)
    assert worked.balanced_tokens() == round(494.5e12 / 3.35e12) == 148  # whatever the model
    assert worked.needed_rate(4, 2500) == 4 * 2500 * 131_072


def test_percentiles_are_nearest_ranks() -> None:
    values = list(range(1, 101))
    assert [worked.percentile(values, p) for p in (1, 50, 95, 99)] == [1, 50, 95, 99]
    assert worked.percentile([3, 4], 50) == 3 and worked.percentile([3, 4], 51) == 4


def random_jobs(rng: random.Random) -> list[worked.Job]:
    """Few different tokens, so that prompts share prefixes, and arrivals fast enough to overlap."""
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 60))] for _ in range(16)]
    for prompt in prompts[8:]:
        prompt[:0] = prompts[0]
    times = sorted(rng.uniform(0, 0.2) for _ in prompts)
    return [
        worked.Job(number, time, list(prompt), rng.choice([1, 2, 20]))
        for number, (time, prompt) in enumerate(zip(times, prompts, strict=True))
    ]


@cache
def one_and_two_pools(seed: int) -> tuple[worked.Run, worked.Run]:
    rng = random.Random(seed)
    size = rng.choice([2, 4, 16])
    num_blocks = worked.BLOCK_SIZE * rng.randint(9, 13) // size  # just above the longest
    pools = [worked.Pool(num_blocks, rng.choice([256, 8192]), size) for _ in range(3)]
    for pool in pools:
        pool.checks_all = True
    rate = rng.choice([1e8, 1e9, 5e10])
    setup = worked.TwoPools(pools[:2], rate, layerwise=rng.random() < 0.5)
    two = worked.Run(setup, random_jobs(random.Random(seed)))
    one = worked.Run(worked.OnePool(pools[2:]), random_jobs(random.Random(seed)))
    return one, two


def test_two_pools_give_the_tokens_of_one_and_lose_none() -> None:
    for seed in range(30):
        one, two = one_and_two_pools(seed)
        for a, b in zip(one.jobs, two.jobs, strict=True):
            assert len(a.tokens) == len(b.tokens) == a.num_output, f"{seed=}: request {a.number}"
            assert a.tokens == b.tokens, f"{seed=}: request {a.number}"
            assert b.times == sorted(b.times) and b.times[0] >= b.arrival
        for pool in [*one.setup.pools, *two.setup.pools]:
            assert pool.num_wrong_reads == 0, f"{seed=}: K and V of another prefix were read"
            manager = pool.manager
            assert manager.num_free_blocks == manager.num_blocks, f"{seed=}: blocks are not free"
            assert not pool.scheduler.has_unfinished()
        setup = two.setup
        assert not setup.pending and not setup.held and not setup.kept and not setup.in_flight


def test_these_runs_cover_preemption_and_cached_prefixes() -> None:
    """Without these cases, the test above would say little."""
    runs = [one_and_two_pools(seed)[1] for seed in range(30)]
    assert sum(each.setup.pools[1].scheduler.num_preemptions for each in runs) > 10
    sent = sum(each.setup.num_bytes for each in runs)
    full = [len(job.prompt) // 16 * 16 for each in runs for job in each.jobs if job.num_output > 1]
    assert 0 < sent < worked.KV_BYTES * sum(full)


def test_without_preemption_only_full_blocks_are_sent_and_the_rest_is_computed() -> None:
    done = worked.run("two pools", "long prompts", 4)
    decode = done.setup.pools[1]
    full = [len(job.prompt) // 16 * 16 for job in done.jobs]
    assert done.setup.num_bytes == worked.KV_BYTES * sum(full)
    assert decode.scheduler.num_preemptions == 0
    assert decode.scheduler.num_hit_tokens == sum(full)


@pytest.mark.size("full")
def test_each_setup_has_its_advantage() -> None:
    rate = 12
    whole, chunked, two = (worked.run(setup, "long prompts", rate) for setup in worked.SETUPS)
    p99 = [worked.percentile(worked.gaps(each.jobs), 99) for each in (whole, chunked, two)]
    assert p99[0] > 3 * p99[1] and p99[1] > p99[2]
    first = [worked.percentile(worked.ttfts(each.jobs), 50) for each in (chunked, two)]
    assert first[1] > 1.5 * first[0]  # one GPU for all prompts has a queue
    assert worked.busy("long answers", 16) < 0.2 < 0.6 < worked.busy("long prompts", rate)
    assert len(cells(worked.load_table("long prompts", [4, 12]))) == 6


@pytest.mark.size("full")
def test_layer_by_layer_hides_most_of_a_transfer() -> None:
    rows = {row[0]: row[1:] for row in cells(worked.link_table("long prompts", 4))}
    whole, by_layer = (float(rows["100 Gb/s"][i].split()[0]) for i in (0, 2))
    assert whole > 3 * by_layer
    between = worked.first_gaps(worked.run("two pools", "long prompts", 4).jobs)
    assert min(between) >= worked.READ


def test_the_events_of_a_request() -> None:
    what = [row[0] for row in cells(worked.life_table())]
    assert what.index("transfer begins") < what.index("first token") < what.index("transfer ends")
    assert what[0] == "arrives" and what[-1].startswith("last token")


def test_without_leases_answers_are_wrong() -> None:
    assert worked.without_leases(True) == "0 of 40"
    assert int(worked.without_leases(False).split()[0]) > 10
