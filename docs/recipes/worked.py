"""Run the policy and the extension of the recipes beside the engine's own behaviour."""

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence

REQUESTS = [(90, 4), (8, 4), (70, 4), (6, 4), (5, 4)]  # tokens of prompt and of output


class ShortestPromptFirst(Scheduler):
    """Scheduler that serves the shortest prompt first and preempts it last.

    `aging` keeps long prompts from starving: to arrive one request earlier counts like being
    this many tokens shorter.
    """

    aging = 2

    def order(self, seq: Sequence) -> tuple[int, int]:
        return (seq.num_prompt_tokens + self.aging * seq.arrival, seq.arrival)


def first_tokens(policy: type[Scheduler]) -> list[int]:
    """Return the step of the first token of each of `REQUESTS`, 2 slots, 32 tokens a step."""
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
    """Return a table of the steps to the first token under both policies, and their means."""
    rows = {"first come, first served": Scheduler, "shortest prompt first": ShortestPromptFirst}
    prompts = " | ".join(f"{prompt} tokens" for prompt, _ in REQUESTS)
    lines = [f"| policy | {prompts} | mean |", "|---|" + "---:|" * (len(REQUESTS) + 1)]
    for words, policy in rows.items():
        steps = first_tokens(policy)
        cells = " | ".join(map(str, steps))
        lines.append(f"| {words} | {cells} | {sum(steps) / len(steps):.1f} |")
    return "\n".join(lines)


def tokens_per_step() -> list[int]:
    """Return the number of tokens of each step of a short run, as an observer received it."""
    seen: list[int] = []
    with LLM("tiny-qwen3") as llm:
        llm.engine.observers.append(lambda plan, batch, result, times: seen.append(plan.num_tokens))
        llm.generate([[1] * 9, [1] * 4], SamplingParams(max_tokens=3, ignore_eos=True))
    return seen


class TenantLimit(Extension):
    """Limit the tokens of a tenant in one step to `most`; long prompts are cut into chunks."""

    def __init__(self, most: int) -> None:
        self.most = most

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        return self._used(seq, plan) < self.most

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return min(num_tokens, self.most - self._used(seq, plan))

    def _used(self, seq: Sequence, plan: Plan) -> int:
        """Return the tokens of this step that already belong to the same tenant (cache salt)."""
        return sum(row.n for row in plan.rows if row.seq.cache_key == seq.cache_key)


def tenant_table(most: int) -> str:
    """Return a table of the tokens of each tenant, step by step: one long prompt, one short."""
    rows: list[list[int]] = []

    def watch(plan: Plan, *step: object) -> None:
        by_salt = {row.seq.request_id: row.n for row in plan.rows}
        rows.append([by_salt.get(name, 0) for name in ("long", "short")])

    with LLM("tiny-qwen3") as llm:
        llm.engine.add_extension(TenantLimit(most))
        llm.engine.observers.append(watch)
        for name, length in (("long", 40), ("short", 6)):
            prompt = {"prompt_token_ids": [1] * length, "cache_salt": name}
            llm.engine.add_request(name, prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
    steps = range(1, len(rows) + 1)
    lines = [f"| step | {' | '.join(map(str, steps))} |", "|---|" + "---:|" * len(rows)]
    for index, name in enumerate(("the long prompt", "the short one")):
        lines.append(f"| {name} | {' | '.join(str(row[index]) for row in rows)} |")
    return "\n".join(lines)
