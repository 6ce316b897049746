"""The policy of the recipe, run beside the engine's own."""

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence

REQUESTS = [(90, 4), (8, 4), (70, 4), (6, 4), (5, 4)]  # tokens of prompt and of output


class ShortestPromptFirst(Scheduler):
    """Whoever has the shortest prompt is served first, and preempted last.

    `aging` is what keeps long prompts from starving: it is worth so many tokens to have arrived
    one request earlier.
    """

    aging = 2

    def order(self, seq: Sequence) -> tuple[int, int]:
        return (seq.num_prompt_tokens + self.aging * seq.arrival, seq.arrival)


def first_tokens(policy: type[Scheduler]) -> list[int]:
    """The step in which each of `REQUESTS` gets its first token: two slots, 32 tokens a step."""
    config = EngineConfig("none", max_num_seqs=2, max_num_batched_tokens=32)
    scheduler = policy(config, num_kv_blocks=32, max_model_len=128)
    sequences = []
    for arrival, (prompt, output) in enumerate(REQUESTS):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        seq = Sequence(str(arrival), [1] * prompt, params, 128, arrival=arrival)
        scheduler.add(seq)
        sequences.append(seq)
    first: dict[str, int] = {}
    step = 0
    while scheduler.has_unfinished():
        step += 1
        plan = scheduler.schedule()
        scheduler.commit(plan)
        for row in plan.sampled:
            first.setdefault(row.seq.request_id, step)
        scheduler.update(plan, [[7] for _ in plan.sampled])
    return [first[seq.request_id] for seq in sequences]


def table() -> str:
    """Steps to the first token under both policies, and their mean."""
    rows = {"first come, first served": Scheduler, "shortest prompt first": ShortestPromptFirst}
    prompts = " | ".join(f"{prompt} tokens" for prompt, _ in REQUESTS)
    lines = [f"| policy | {prompts} | mean |", "|---|" + "---:|" * (len(REQUESTS) + 1)]
    for words, policy in rows.items():
        steps = first_tokens(policy)
        cells = " | ".join(map(str, steps))
        lines.append(f"| {words} | {cells} | {sum(steps) / len(steps):.1f} |")
    return "\n".join(lines)


def tokens_per_step() -> list[int]:
    """How many tokens each step of a short run has computed, as an observer saw it."""
    seen: list[int] = []
    with LLM("tiny-qwen3") as llm:
        llm.engine.observers.append(lambda plan, batch, result, times: seen.append(plan.num_tokens))
        llm.generate([[1] * 9, [1] * 4], SamplingParams(max_tokens=3, ignore_eos=True))
    return seen
