"""Worked examples for the chapter on the life of a request: progress, timestamps, extensions."""

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from tables import table

from nanoserve.outputs import RequestMetrics

ROOT = Path(__file__).parents[2]
# The methods of `Extension` in the order of a step, and what each may do.
METHODS = {
    "on_add": "hold a new request",
    "on_step_start": "release held sequences, or finish sequences",
    "token_budget": "lower the token budget of this step",
    "may_admit": "see a waiting sequence before it is admitted, and leave it out of this step",
    "on_admit": "note that a sequence begins to run, or fill its blocks from elsewhere",
    "limit_tokens": "give a sequence fewer tokens, or none",
    "extend_plan": "add draft tokens",
    "forward_inputs": "add inputs of the model",
    "sample_inputs": "add inputs of the sampler",
    "on_result": "read the result of the step",
    "on_release": "drop the state of a sequence that was preempted or has finished",
    "on_reset": "drop the state of steps that were discarded",
    "close": "release threads, memory and files",
}
# Extensions of nanoserve by class.
FEATURES = {
    "StructuredOutputs": "structured output",
    "Speculation": "speculative decoding",
    "PipelineSchedule": "pipeline parallelism",
    "HostTier": "KV offloading",
    "ConnectorLoads": "KV connectors",
    "ConnectorStores": "KV connectors",
    "ReturnRoutedExperts": "routed experts",
    "KVEvents": "KV events",
    "HostCopies": "trace",
    "RequestSpans": "request spans",
    "LoRAAdapters": "adapters",
    "PromptEmbedsInput": "prompt embeddings",
}


def progress(
    num_prompt_tokens: int, num_cached: int, budget: int, num_output_tokens: int
) -> list[tuple[int, int, int, bool]]:
    """Steps of a request that runs alone, up to its last token.

    Each is (tokens computed in it, num_computed_tokens and num_tokens after it, whether it yielded
    a token). `num_cached` prompt tokens come from the prefix cache; a step computes at most
    `budget` tokens.
    """
    steps, computed, total = [], num_cached, num_prompt_tokens
    while total < num_prompt_tokens + num_output_tokens:
        n = min(total - computed, budget)
        computed += n
        caught_up = computed == total
        total += caught_up
        steps.append((n, computed, total, caught_up))
    return steps


def progress_table(
    num_prompt_tokens: int, num_cached: int, budget: int, num_output_tokens: int
) -> str:
    """`progress` as a table."""
    steps = progress(num_prompt_tokens, num_cached, budget, num_output_tokens)
    rows = [
        [number, n, computed, total, "yes" if caught_up else ""]
        for number, (n, computed, total, caught_up) in enumerate(steps, start=1)
    ]
    return table(
        ["step", "tokens computed", "`num_computed_tokens`", "`num_tokens`", "new token"], rows
    )


def left_behind(num_new_tokens: int) -> int:
    """Computed tokens that an engine misses if it counts one per step."""
    return num_new_tokens - 1


def clock(
    arrival: float, scheduled: float, token_times: Sequence[float], finished: float
) -> RequestMetrics:
    """The metrics of a request with these timestamps, in seconds."""
    return RequestMetrics(
        arrival_time=arrival,
        first_scheduled_time=scheduled,
        first_token_time=token_times[0],
        last_token_time=token_times[-1],
        finished_time=finished,
        num_output_tokens=len(token_times),
        num_intervals=len(token_times) - 1,
        interval_seconds=token_times[-1] - token_times[0],
    )


def gaps(token_times: Sequence[float]) -> list[float]:
    """Seconds between one token and the next."""
    return [later - earlier for earlier, later in pairwise(token_times)]


def extension_classes() -> Iterator[ast.ClassDef]:
    """The subclasses of `Extension` in nanoserve/features."""
    for path in sorted((ROOT / "nanoserve/features").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            bases = getattr(node, "bases", [])
            if isinstance(node, ast.ClassDef) and "Extension" in map(ast.unparse, bases):
                yield node


def users_of(method: str) -> list[str]:
    """The features whose extensions override a method."""
    names = {
        node.name
        for node in extension_classes()
        if any(getattr(each, "name", None) == method for each in node.body)
    }
    return list(dict.fromkeys(feature for name, feature in FEATURES.items() if name in names))


def extensions_table() -> str:
    """The methods of `Extension`, what they may do, and the features that use them."""
    rows = [[f"`{name}`", what, ", ".join(users_of(name))] for name, what in METHODS.items()]
    return table(["method", "what it may do", "used by"], rows)
