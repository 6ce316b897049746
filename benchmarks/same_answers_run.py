"""Run one version of the engine for `same_answers.py`, in a process of its own.

    PYTHONPATH=TREE python benchmarks/same_answers_run.py SCENARIO.json ANSWERS.jsonl TREE

Only public functions are called, so that one file runs all versions. Each configuration adds a line
to the answers when it is complete, so the file shows how far a process came that has died.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import nanoserve
from nanoserve import LLM, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.features.beam_search import BeamSearchParams


def no_even_ids(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[4::2] = -torch.inf
    return logits


def no_repeats(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[token_ids] = -torch.inf
    return logits


def raises_at_4(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(token_ids) == 4:
        raise KeyError("four tokens")
    return logits


def makes_nan(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * (torch.nan if len(token_ids) == 2 else 1)


def forbids_all(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits - (torch.inf if len(token_ids) == 3 else 0)


PROCESSORS = {f.__name__: f for f in (no_even_ids, no_repeats, raises_at_4, makes_nan, forbids_all)}


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    given = dict(given)
    if "output_kind" in given:
        given["output_kind"] = RequestOutputKind(given["output_kind"])
    if "logits_processors" in given:
        given["logits_processors"] = [PROCESSORS[name] for name in given["logits_processors"]]
    if "logit_bias" in given:
        given["logit_bias"] = {int(key): value for key, value in given["logit_bias"].items()}
    return SamplingParams(**given)


def error_of(error: BaseException | None) -> list[str] | None:
    """Return type and message, without addresses of objects."""
    if error is None:
        return None
    return [type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error))]


def plain_logprobs(positions: Any) -> Any:
    """Return lists of (token id, log-probability, rank, text), a list for each position."""
    if positions is None:
        return None
    return [
        None if one is None else [[i, p.logprob, p.rank, p.decoded_token] for i, p in one.items()]
        for one in positions
    ]


class Answer:
    """The output of a request so far; deltas are put together in the order in which they came."""

    def __init__(self, kind: str = "cumulative") -> None:
        self._is_delta = kind == "delta"
        self._last: RequestOutput | None = None
        self._completions: dict[int, dict[str, Any]] = {}
        self._prompt_logprobs: Any = None
        self._faults: list[str] = []
        self.last_step: int | None = None  # in which the last output came

    @property
    def num_tokens(self) -> int:
        return sum(len(one["token_ids"]) for one in self._completions.values())

    @property
    def finished(self) -> bool:
        return self._last is not None and self._last.finished

    def add(self, output: RequestOutput) -> None:
        if self.finished:
            self._faults.append("an output after the last one")
        self._last = output
        self._prompt_logprobs = plain_logprobs(output.prompt_logprobs) or self._prompt_logprobs
        for new in output.outputs:
            entry = {
                "text": new.text,
                "token_ids": list(new.token_ids),
                "logprobs": plain_logprobs(new.logprobs),
                "cumulative_logprob": new.cumulative_logprob,
                "finish_reason": new.finish_reason,
                "stop_reason": new.stop_reason,
            }
            before = self._completions.get(new.index)
            if before is not None and self._is_delta:
                for name in ("text", "token_ids", "logprobs"):
                    if before[name] is not None and entry[name] is not None:
                        entry[name] = before[name] + entry[name]
            elif before is not None:
                is_longer = entry["text"].startswith(before["text"])
                if not is_longer and entry["finish_reason"] is None:
                    self._faults.append(f"{before['text']!r} became {entry['text']!r}")
            self._completions[new.index] = entry

    def as_json(self, with_cached: bool = False) -> dict[str, Any]:
        answer: dict[str, Any] = {"completions": self._completions, "faults": self._faults}
        if self._last is not None:
            answer["prompt"] = self._last.prompt
            answer["prompt_token_ids"] = list(self._last.prompt_token_ids)
            answer["prompt_logprobs"] = self._prompt_logprobs
            answer["error"] = error_of(self._last.error)
            answer["finished"] = self._last.finished
            answer["last_step"] = self.last_step
            if self._last.finished:
                answer["num_output_tokens"] = self._last.metrics.num_output_tokens
        if with_cached and self._last is not None:
            answer["num_cached_tokens"] = self._last.num_cached_tokens
        return answer


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:
        return {"refused": error_of(error)}


def generate_all(llm: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # A priority other than 0 is an error where the policy has none.
    priorities = [request.get("priority", 0) for request in requests]
    outputs = llm.generate(
        [request["prompt"] for request in requests],
        [sampling_params(request["params"]) for request in requests],
        use_tqdm=False,
        priority=priorities if any(priorities) else None,
    )
    return [answer_of(output) for output in outputs]


def answer_of(output: RequestOutput, with_cached: bool = False) -> dict[str, Any]:
    answer = Answer()
    answer.add(output)
    return answer.as_json(with_cached)


def generate_one(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    params = sampling_params(request["params"])
    return answer_of(llm.generate([request["prompt"]], params, use_tqdm=False)[0], True)


def take_turns(llm: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run each request alone; one that `continues` has all before it in its conversation first."""
    answers: list[dict[str, Any]] = []
    past: list[int] = []
    for request in requests:
        past = past if request["continues"] else []
        prompt = past + request["prompt"]
        continued = request | {"prompt": prompt}
        answers.append(attempt(lambda continued=continued: generate_one(llm, continued)))
        completions = answers[-1].get("completions", {})
        past = prompt + (completions[0]["token_ids"] if 0 in completions else [])
    return answers


def step_through(
    llm: LLM, requests: list[dict[str, Any]], reset_at: list[int]
) -> list[dict[str, Any]]:
    """Add requests when their step has come, abort those that have got enough.

    After the steps of `reset_at` all that is cached is dropped, and what runs is computed again.
    """
    engine, answers, refused = llm.engine, {}, {}
    coming = sorted(requests, key=lambda request: request["arrival"])
    to_abort = {r["id"]: r["abort_after"] for r in requests if "abort_after" in r}
    num_steps = 0
    while coming or engine.has_unfinished_requests():
        while coming and coming[0]["arrival"] <= num_steps:
            request = coming.pop(0)
            name, prompt = request["id"], request["prompt"]
            try:
                params = sampling_params(request["params"])
                engine.add_request(name, prompt, params, request.get("priority", 0))
            except ValueError as error:
                refused[name] = {"refused": error_of(error)}
            else:
                answers[name] = Answer(request["params"].get("output_kind", "cumulative"))
        for output in engine.step():
            answers[output.request_id].add(output)
            answers[output.request_id].last_step = num_steps
        for name, most in to_abort.items():
            if name in answers and not answers[name].finished and answers[name].num_tokens >= most:
                last = engine.abort_request(name)
                if last is not None:
                    answers[name].add(last)
        num_steps += 1
        if num_steps in reset_at:
            llm.reset_prefix_cache(reset_running_requests=True)
    answered = {name: answer.as_json() for name, answer in answers.items()} | refused
    return [answered[request["id"]] for request in requests]


def read_streams(llm: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Read a piece of each stream in turn, until all are over."""
    answers, errors, streams = [], {}, {}
    for number, request in enumerate(requests):
        answers.append(Answer("delta"))
        try:
            streams[number] = llm.stream(request["prompt"], sampling_params(request["params"]))
        except ValueError as error:
            errors[number] = error_of(error)
    while streams:
        for number, stream in list(streams.items()):
            most = requests[number].get("abort_after")
            if most is not None and answers[number].num_tokens >= most:
                stream.close()
                del streams[number]
                continue
            try:
                answers[number].add(next(stream))
            except StopIteration:
                del streams[number]
            except Exception as error:
                errors[number] = error_of(error)
                del streams[number]
    return [a.as_json() | {"raised": errors.get(number)} for number, a in enumerate(answers)]


def search_beams(llm: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = []
    for request in requests:
        params = BeamSearchParams(**request["params"])
        (output,) = llm.beam_search([request["prompt"]], params)
        completions = {}
        for index, beam in enumerate(output.sequences):
            entry = {"text": beam.text, "token_ids": list(beam.tokens), "score": beam.score}
            entry["cumulative_logprob"] = beam.cum_logprob
            entry["logprobs"] = plain_logprobs(beam.logprobs)
            entry |= {"finish_reason": beam.finish_reason, "stop_reason": beam.stop_reason}
            completions[index] = entry
        answers.append({"completions": completions})
    return answers


def try_options(options: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    with LLM("tiny-qwen3", **{**options, **other}):
        return {"accepted": True}


def run_round(llm: LLM, options: dict[str, Any], one: dict[str, Any]) -> Iterable[dict[str, Any]]:
    kind, requests = one["kind"], one["requests"]
    if kind == "generate":
        return generate_all(llm, requests)
    if kind == "engine":
        return step_through(llm, requests, one.get("reset_at", []))
    if kind == "turns":
        return take_turns(llm, requests)
    if kind == "stream":
        return read_streams(llm, requests)
    if kind == "beam":
        return search_beams(llm, requests)
    if kind == "options":
        return [attempt(lambda r=r: try_options(options, r)) for r in requests]
    return [attempt(lambda r=r: generate_one(llm, r)) for r in requests]


def run_configuration(configuration: dict[str, Any]) -> dict[str, Any]:
    """Return the answers, a list for each round, and what the engine has counted."""
    start, options, rounds = time.perf_counter(), configuration["options"], []
    stats: dict[str, Any] = {}
    try:
        with LLM("tiny-qwen3", **options) as llm:
            for one in configuration["rounds"]:
                rounds.append(list(run_round(llm, options, one)))
            stats = {name: v for name, v in vars(llm.stats).items() if isinstance(v, int)}
    except Exception as error:
        rounds.append([{"raised": error_of(error)}])
    seconds = time.perf_counter() - start
    return {"name": configuration["name"], "rounds": rounds, "stats": stats, "seconds": seconds}


def main() -> None:
    scenario, answers, tree = map(Path, sys.argv[1:])
    found = Path(nanoserve.__file__).parent.parent
    if found != tree:
        sys.exit(f"nanoserve was imported from {found}, not from {tree}")
    with answers.open("a") as file:
        for configuration in json.loads(scenario.read_text()):
            file.write(json.dumps(run_configuration(configuration)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
