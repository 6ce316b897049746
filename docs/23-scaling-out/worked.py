"""Chapter 23's numbers: stages and their bubbles, bytes between ranks, ways to use eight GPUs.

The engine's own `PipelineSchedule` decides which sequences run in which step, and its own
`PrefixRouter` which replica gets a request; the fleet is that of `benchmarks/routing.py`, at a
small scale. Layers are of equal size unless stated otherwise, and times are lower bounds: the time
to read the weights, or to send the bytes, at the full rate.
"""

from dataclasses import replace
from functools import cache
from string import ascii_uppercase
from types import SimpleNamespace

import routing
from tables import table

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.parallel.pipeline_schedule import PipelineSchedule
from nanoserve.features.parallel.pipeline_stage import share_layers
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.replicas.prefix_router import DEFAULT_GAMMA, PrefixRouter

# LLaMA-2-70B in 16 bits, on GPUs of 80 GB with 3.35 TB/s (H100), of which 0.9 is used.
WEIGHTS = 2 * 68_976_648_192
LAYERS, HIDDEN = 80, 8192
KV_BYTES = 2 * LAYERS * 8 * 128 * 2  # of a token: K and V, 8 KV heads of 128, two bytes each
GPU, BANDWIDTH = 0.9 * 80e9, 3.35e12


# ---------------------------------------------------------------- ways to use eight GPUs


def ways_table(num_gpus: int = 8) -> str:
    """Table: replicas x stages x ranks, KV tokens beside the weights, time of a token."""
    rows = []
    for dp, pp, tp in [(1, 1, 8), (1, 2, 4), (1, 8, 1), (2, 1, 4), (4, 1, 2), (8, 1, 1)]:
        assert dp * pp * tp == num_gpus
        room = kv_tokens(dp, pp, tp)
        fits = (f"{room:,}", f"{room // dp:,}") if room > 0 else ("does not fit", "")
        weights = f"{WEIGHTS / pp / tp / 1e9:.1f} GB"
        rows.append((dp, pp, tp, weights, *fits, f"{read_ms(tp):.1f} ms"))
    names = ("replicas", "stages", "ranks a stage", "weights on a GPU")
    return table((*names, "KV tokens, all", "of one replica", "a token takes"), rows)


def layers_of_stages(shape: str, num_stages: int) -> list[int]:
    """How many layers each stage of a pipeline has, by the engine's own rule."""
    model_config = ModelConfig.from_hf(SHAPES[shape], {})
    return [len(layers) for layers in share_layers(model_config, num_stages)]


def kv_tokens(dp: int, pp: int, tp: int) -> int:
    """Number of tokens whose K and V fit beside the weights, in all replicas together."""
    return int(dp * (pp * tp * GPU - WEIGHTS) // KV_BYTES)


def read_ms(tp: int) -> float:
    """Milliseconds in which a token passes all layers, if only reading the weights takes time.

    Stages do not shorten it: they read their parts one after the other.
    """
    return WEIGHTS / tp / BANDWIDTH * 1e3


# ---------------------------------------------------------------- stages


def bubble(stages: int, steps: int) -> float:
    """The idle share of a pipeline that is filled, computes `steps` equal steps, and drains."""
    return (stages - 1) / (steps + stages - 1)


def bubble_table(stages: list[int], steps: list[int]) -> str:
    rows = [(p, *(f"{bubble(p, m):.1%}" for m in steps)) for p in stages]
    return table(("stages", *(f"{m:,} step{'s' * (m > 1)}" for m in steps)), rows)


def schedule_table(stages: int, steps: int) -> str:
    """Table: which step each stage computes, by time, if each takes one unit in each stage."""
    length = steps + stages - 1
    rows = [
        (f"stage {s}", *(t - s + 1 if 0 <= t - s < steps else "" for t in range(length)))
        for s in range(stages)
    ]
    return table(("time", *range(length)), rows)


class TakesAll(Extension):
    """Leaves out sequences that wait for a token, and does not divide the others into steps."""

    def __init__(self, engine: object) -> None:
        pass

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return 0 if seq.num_pending else num_tokens


def who_runs(num_seqs: int, prompt_len: int, stages: int, shared: bool, num_steps: int) -> list:
    """{name: tokens} of each step; as many steps are in flight as there are stages."""
    config = EngineConfig("none", enable_prefix_caching=False).for_device("cpu")
    scheduler = Scheduler(config, 4096, max_model_len=4096, extensions=(extensions := []))
    schedule = PipelineSchedule if shared else TakesAll
    config = replace(config, pipeline_parallel_size=stages)
    extensions.append(extension := schedule(SimpleNamespace(config=config, scheduler=scheduler)))
    under_way: list[Plan] = []
    for i in range(num_seqs):
        params = SamplingParams(max_tokens=1000)
        scheduler.add(Sequence(ascii_uppercase[i], [1] * prompt_len, params, 4096, arrival=i))
    planned = []
    for _ in range(num_steps):
        if len(under_way) == stages:  # the oldest has left the last stage
            plan = under_way.pop(0)
            token_ids = [[7] for _ in plan.sampled]
            scheduler.update(plan, token_ids)
            extension.on_result(plan, StepResult(token_ids))
        plan = scheduler.schedule()
        extension.forward_inputs(plan, ForwardInputs())
        scheduler.commit(plan)
        under_way.append(plan)
        planned.append({row.seq.request_id: row.n for row in plan.rows})
    return planned


def who_runs_table(num_seqs: int, prompt_len: int, stages: int, num_steps: int) -> str:
    """Table: what each step computes, with the sequences divided into steps and without."""
    shared, all_at_once = (
        who_runs(num_seqs, prompt_len, stages, each, num_steps) for each in (True, False)
    )
    rows = [
        (i, _listed(mine), _listed(theirs))
        for i, (mine, theirs) in enumerate(zip(shared, all_at_once, strict=True), 1)
    ]
    return table(("step", "nanoserve's scheduler", "a step takes all sequences"), rows)


def traffic_table(ranks: int, tokens: list[int]) -> str:
    """Table: bytes that a rank sends in a step of LLaMA-2-70B, and how long that takes."""
    rows = []
    for n in tokens:
        for name, sent in (("ranks", tp_bytes(n, ranks)), ("stages", pp_bytes(n))):
            times = (f"{sent / rate * 1e3:,.2f} ms" for rate in (450e9, 25e9))
            rows.append((f"{n:,}", f"{ranks} {name}", f"{sent / 1e6:,.1f} MB", *times))
    return table(("tokens", "split over", "a rank sends", "at 450 GB/s", "at 25 GB/s"), rows)


def pp_bytes(tokens: int) -> int:
    """From one stage to the next: the hidden states, once a step."""
    return tokens * HIDDEN * 2


def tp_bytes(tokens: int, ranks: int) -> float:
    """Two all-reduces a layer and one for the embedding; in a ring, 2 (p - 1) / p of each."""
    return (2 * LAYERS + 1) * 2 * (ranks - 1) / ranks * pp_bytes(tokens)


def decode_rate(batch: int, tp: int, pp: int) -> float:
    """Tokens a second of all stages together, if a step takes as long as reading its weights.

    As many steps are in flight as there are stages, each with an equal part of the sequences.
    """
    return batch / pp * BANDWIDTH / (WEIGHTS / pp / tp)


# ---------------------------------------------------------------- replicas


def overflow_table(prompt_len: int, matched: int, loads: list[int]) -> str:
    """Table: A has a prefix of the prompt and some load, B has neither; which gets the request."""
    rows = []
    for load in loads:
        score = matched / prompt_len - load / prompt_len
        rows.append((f"{load:,}", f"{score:.2f}", "0.00", chosen(prompt_len, matched, load)))
    return table(("tokens that wait at A", "score of A", "score of B", "goes to"), rows)


def chosen(prompt_len: int, matched: int, load: int) -> str:
    """The choice of a router that has seen no other request."""
    router = PrefixRouter(block_size=16, prefix_cache_seed=0)
    for replica in "AB":
        router.add_replica(replica, num_kv_blocks=1024)
    hashes = router.hashes(list(range(prompt_len)))
    router.sent("A", hashes[: matched // 16])
    return router.choose(hashes, prompt_len, {"A": load, "B": 0})


def no_favour_at() -> float:
    """Multiple of the mean share of the work from which on a match does not count."""
    return 1 + 1 / DEFAULT_GAMMA


POLICIES = ("least loaded", "pure affinity", "ours, approximate")


@cache
def fleet(trace: str, policy: str) -> routing.Found:
    """Four replicas, forty requests each, by `benchmarks/routing.py`."""
    jobs = routing.TRACES[trace](4, 40)
    return routing.simulate(4, jobs, routing.POLICIES[policy])


def fleet_table() -> str:
    rows = []
    for trace in ("one hot prefix", "conversations"):
        for policy in POLICIES:
            found = fleet(trace, policy)
            cells = f"{found.hits:.0%}", f"{found.spread:.2f}", f"{1e3 * found.mean_ttft:,.0f} ms"
            rows.append((trace, policy, *cells))
    return table(("traffic", "rule", "hits", "spread", "mean TTFT"), rows)


# ---------------------------------------------------------------- all of it together


def place(rank: int, tp: int, pp: int) -> tuple[int, int]:
    """Stage of a rank of a nanoserve engine, and its index there: rank 0 is in the last stage."""
    return pp - 1 - rank // tp, rank % tp


def place_in_vllm(rank: int, tp: int, pp: int) -> tuple[int, int, int]:
    """Replica, stage and index there: replicas outermost, and stages from the first on."""
    return rank // (tp * pp), rank // tp % pp, rank % tp


def groups_table(tp: int, pp: int, dp: int) -> str:
    """Table: the position of each rank, numbered as in vLLM and as in nanoserve."""
    rows = []
    for rank in range(tp * pp * dp):
        replica, stage, inside = place_in_vllm(rank, tp, pp)
        ours = next(r for r in range(tp * pp) if place(r, tp, pp) == (stage, inside))
        rows.append((replica, stage, inside, rank, ours))
    return table(("replica", "stage", "index in it", "rank in vLLM", "rank in its engine"), rows)


def start_seconds(gigabytes_a_second: float) -> float:
    """Seconds in which a new replica of LLaMA-2-70B reads its weights."""
    return WEIGHTS / 1e9 / gigabytes_a_second


def _listed(planned: dict[str, int]) -> str:
    if len(planned) > 3 and set(planned.values()) == {1}:
        return f"{min(planned)} to {max(planned)}: 1 each"
    return ", ".join(f"{name}: {n}" for name, n in planned.items()) or "none"
