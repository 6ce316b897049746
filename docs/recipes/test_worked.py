"""Tests of the recipes' policy, observer and extension."""

from shadow_kv import ShadowRun

from nanoserve.engine.scheduler import Scheduler

from . import worked


def test_short_prompts_come_first_and_long_ones_come_too() -> None:
    steps = worked.first_tokens(worked.ShortestPromptFirst)
    by_prompt = [step for _, step in sorted(zip(worked.REQUESTS, steps, strict=True))]
    assert max(by_prompt[:3]) < min(by_prompt[3:])
    assert sum(steps) < sum(worked.first_tokens(Scheduler))


def test_ageing_bounds_how_many_requests_may_overtake() -> None:
    class Patient(worked.ShortestPromptFirst):
        aging = 1000

    assert worked.first_tokens(Patient) == worked.first_tokens(Scheduler)


def test_a_policy_reads_no_wrong_kv() -> None:
    for seed in range(100):
        ShadowRun(seed, worked.ShortestPromptFirst).run()


def test_the_table_has_a_line_for_each_policy() -> None:
    assert worked.table().count("\n") == 3


def test_an_observer_sees_every_step() -> None:
    assert worked.tokens_per_step() == [13, 2, 2]


def test_a_tenant_takes_no_more_of_a_step_than_the_limit() -> None:
    rows = worked.tenant_table(16).splitlines()[2:]
    long, short = ([int(cell) for cell in row.split("|")[2:-1]] for row in rows)
    assert long[:3] == [16, 16, 8] and short[:4] == [6, 1, 1, 1]
