"""One simulated engine, which is moved from event to event.

An event is the end of a step or of a leap. What a step yields is known when it begins, and is
delivered when it ends. A leap under way can be cut short by an arrival: the steps that would have
started before it are done, and the next step sees the new request.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.simulate.executor import Script, Scripts, SimulatedExecutor, VirtualClock
from nanoserve.cli.simulate.leap import Leap, apply_leap, can_leap, plan_leap
from nanoserve.cli.simulate.step_time import StepTime
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.utils.checks import require

# The options of the features in `nanoserve.build`, which is not imported here: it imports PyTorch.
NOT_SIMULATED = (
    *("pipeline_parallel_size", "speculative_config", "enable_lora", "kv_offloading_size"),
    *("kv_offloading_path", "kv_transfer_config", "kv_events_config"),
    *("enable_return_routed_experts", "otlp_traces_endpoint", "pooler_config"),
    "enable_prompt_embeds",
)


@dataclass(frozen=True)
class Setup:
    """The parts of a simulated engine.

    config: without the options of `NOT_SIMULATED`.
    extensions: functions that make extensions, called with the engine.
    leaps: False computes each step, also where nothing changes.
    """

    config: EngineConfig
    model_config: ModelConfig
    num_kv_blocks: int
    step_time: StepTime
    extensions: tuple[Callable[[LLMEngine], Extension], ...] = ()
    leaps: bool = True

    def __post_init__(self) -> None:
        """Raise `ValueError` for options that enable a feature, which would be ignored."""
        changed = self.config.changed_options()
        ignored = [name for name in NOT_SIMULATED if name in changed]
        # With runner="auto", the model decides.
        if self.config.runner == "pooling" or self.model_config.pooling is not None:
            ignored.append("runner='pooling'")
        require(
            not ignored,
            f"{', '.join(ignored)} cannot be simulated: leave it out, or pass an extension of your "
            f"own that does the same",
        )


class TokenTimes:
    """The intervals between tokens: values with how often each of them occurred."""

    def __init__(self) -> None:
        self.seconds, self.counts = array("d"), array("q")
        self._last: dict[Sequence, float] = {}  # time of the last token

    def note(self, plan: Plan, result: StepResult, now: float) -> None:
        """Note the tokens of a step that ends at `now`; a stop token is not output."""
        found: dict[float, int] = {}
        for row, token_ids in zip(plan.sampled, result.token_ids, strict=True):
            seq, last = row.seq, self._last.pop(row.seq, None)
            count = len(token_ids)
            if seq.finished:
                count -= bool(token_ids) and token_ids[-1] in seq.stop_token_ids
            else:
                self._last[seq] = now
            if last is not None and count > 0:
                found[now - last] = found.get(now - last, 0) + 1
            if count > 1:  # accepted draft tokens come together
                found[0.0] = found.get(0.0, 0) + count - 1
        self.seconds.extend(found)
        self.counts.extend(found.values())

    def note_leap(self, leap: Leap) -> None:
        """Note the tokens of all steps of a leap."""
        durations = leap.durations.tolist()
        self.seconds.extend(durations)
        self.counts.extend([len(leap.sequences)] * len(durations))
        end = float(leap.ends[-1])
        for seq in leap.sequences:
            self._last[seq] = end


class Replica:
    """A simulated engine. `busy_until` is the end of the step or leap under way, or None.

    speed: divides the times of all steps. longest_leap: in seconds.
    """

    def __init__(
        self,
        setup: Setup,
        name: str = "0",
        speed: float = 1.0,
        longest_leap: float = float("inf"),
    ) -> None:
        self.name, self.clock, self.scripts = name, VirtualClock(), Scripts()
        config = setup.config
        parts = setup.step_time, self.clock, self.scripts, speed
        self.executor = SimulatedExecutor(config, setup.model_config, setup.num_kv_blocks, *parts)
        self.engine = LLMEngine(config, setup.model_config, self.executor, None, self.clock)
        self.engine.extensions.extend(make(self.engine) for make in setup.extensions)
        self.busy_until: float | None = None
        self._last_end = self._idle_seconds = 0.0
        self.token_times = TokenTimes()
        # Seconds of steps in which requests waited, by what they waited for.
        self.waited_for = {"max_num_seqs": 0.0, "max_num_batched_tokens": 0.0, "KV blocks": 0.0}
        self._leaps = setup.leaps and longest_leap > 0 and can_leap(self.engine)
        self._longest_leap = longest_leap
        self._leap: Leap | None = None
        self._outputs: list[RequestOutput] = []
        self._seeds: dict[str, int] = {}  # of unfinished requests
        self._num_leapt_steps = self._num_leapt_tokens = 0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a step was under way."""
        return self._last_end - self._idle_seconds

    @property
    def stats(self) -> EngineStats:
        """Totals of the engine, with the steps of leaps."""
        stats = self.engine.stats
        return replace(
            stats,
            num_steps=stats.num_steps + self._num_leapt_steps,
            num_computed_tokens=stats.num_computed_tokens + self._num_leapt_tokens,
        )

    def add(self, request: Request, outputs: list[Script], now: float) -> None:
        """Queue a request at `now`, with the output of each completion."""
        self.interrupt(now)
        self.engine.add(request)
        seed = request.sequences[0].seed  # drawn by the engine unless the request has one
        self._seeds[request.request_id] = seed
        self.scripts.add(seed, outputs)

    def begin(self, now: float) -> None:
        """Begin a step or a leap at `now`, if there is anything to compute."""
        if self.busy_until is not None or not self.engine.scheduler.has_unfinished():
            return
        self.clock.advance_to(now)
        self._idle_seconds += now - self._last_end
        self._last_end = now
        if self._leaps:
            self._leap = plan_leap(self.engine, self.executor, now)
            if self._leap is not None:
                self.interrupt(now + self._longest_leap)
                return
        self._step()

    def _step(self) -> None:
        steps = self.engine.advance()
        if not steps and not self.engine.plans_under_way:
            return  # every sequence is held
        self.engine.report(steps)
        for step in steps:
            self.token_times.note(step.plan, step.result, self.clock.now)
        self._outputs = self.engine.outputs.take()
        self.busy_until = self.clock.now
        if steps and self.engine.scheduler.waiting:
            self._note_shortage(steps[-1].plan)

    def _note_shortage(self, plan: Plan) -> None:
        """Note what the requests that a step has not admitted waited for."""
        scheduler = self.engine.scheduler
        if len(plan.rows) >= scheduler.max_num_seqs:
            name = "max_num_seqs"
        elif plan.budget <= 0:
            name = "max_num_batched_tokens"
        else:
            name = "KV blocks"
        self.waited_for[name] += self.busy_until - self._last_end

    def interrupt(self, now: float) -> None:
        """Cut a leap short: of its steps, only those that start before `now` are computed."""
        if self._leap is not None:
            num_steps = self._leap.num_started_before(now)
            self._leap = self._leap.first(num_steps) if num_steps else None
            self.busy_until = float(self._leap.ends[-1]) if self._leap is not None else None

    def end(self) -> list[RequestOutput]:
        """End the step or leap under way; returns the outputs of requests that have finished."""
        leap, self._leap = self._leap, None
        if leap is not None:
            apply_leap(self.engine, self.executor, leap)
            self.clock.advance_to(self.busy_until)
            self.token_times.note_leap(leap)
            if leap.is_short_of_slots:  # a request that has just arrived waits for the step only
                self.waited_for["max_num_seqs"] += self.busy_until - leap.start
            self._num_leapt_steps += len(leap.ends)
            self._num_leapt_tokens += len(leap.ends) * len(leap.sequences)
        self.busy_until, self._last_end = None, self.busy_until
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            self.scripts.remove(self._seeds.pop(output.request_id, None))
        return outputs
