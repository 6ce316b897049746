"""`nanoserve batch IN OUT`: answer a file of requests, and go on where an earlier run ended."""

import asyncio
import os
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.parser import Parser, Words, from_json
from nanoserve.utils.checks import check_int, check_number, require

if TYPE_CHECKING:
    from nanoserve.serve.batch.batch_job import Job
    from nanoserve.serve.batch.requests import Todo

# vLLM's engine has them, too.
_OURS = ("served_model_name", "reasoning_parser", "data_parallel_size")
_SETTINGS = (
    *("served_model_name", "tool_call_parser", "reasoning_parser"),
    "default_chat_template_kwargs",
)


def main(arguments: list[str]) -> int:
    """0: every line has the answer that it asked for. 1: all is done, and some lines were wrong.
    2: it could not be run, or not to the end. 130, 143: Ctrl-C, SIGTERM."""
    args = _parser().parse_args(arguments)
    try:
        return _run(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"nanoserve batch: {error}", file=sys.stderr)
        return 2


def _run(args: Namespace) -> int:
    path = Path(_one_of("IN", args.input, args.input_file))
    out = Path(_one_of("OUT", args.output, args.output_file))
    check_int("replicas", args.replicas, 1)
    check_number("grace_period", args.grace_period, 0)
    require(path.is_file(), f"{path} is not a file")
    is_same = out.exists() and os.path.samefile(path, out)
    require(not is_same, f"{out} is the input: name another file for the answers")
    _check_packages(args)
    from nanoserve.serve.batch.batch_job import Job
    from nanoserve.serve.batch.output_file import AnswersFile
    from nanoserve.serve.batch.resume import survey

    def report(number: int, told: str) -> None:
        print(f"{path}:{number}: {told}", file=sys.stderr)

    options = engine_options(args, _OURS)
    salt = f"{args.model} {options.get('seed', 0)}"
    answers = AnswersFile(out)
    try:
        found = survey(path, salt, answers, report)
        job, stopped_by = Job(path, answers, found), 0
        try:
            if found.todo:
                stopped_by = _answer(args, path, salt, found.todo, job, options)
        finally:
            job.close()
    finally:
        answers.close()
    print(job.summary(), file=sys.stderr)
    if stopped_by:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + stopped_by  # as a shell has it
    return 0 if job.is_good else 1


def _answer(
    args: Namespace, path: Path, salt: str, todo: "Todo", job: "Job", options: dict[str, Any]
) -> int:
    """The signal that ended it early, or 0."""
    settings = {name: getattr(args, name) for name in _SETTINGS}
    settings = {name: value for name, value in settings.items() if value is not None}
    answerer: dict[str, Any] = {"model": args.model, "options": options, "settings": settings}
    answerer["engine_process"] = args.engine_process
    if args.replicas > 1 or args.ray_address:
        from nanoserve.serve.batch.ray_runner import answer_on_ray

        where = args.replicas, args.ray_address
        return answer_on_ray(path, salt, todo, answerer, job.take, *where)
    from nanoserve.serve.batch.local_runner import answer_here
    from nanoserve.serve.batch.request_executor import Answerer
    from nanoserve.serve.batch.restarts import RestartingAnswerer

    one = RestartingAnswerer(partial(Answerer, **answerer))
    try:
        lines = todo.lines(path, salt)
        return asyncio.run(answer_here(one, lines, job.take, args.grace_period))
    finally:
        one.close()


def _check_packages(args: Namespace) -> None:
    try:
        import nanoserve.serve.http.app  # noqa: F401
    except ModuleNotFoundError as error:
        told = f"what a server needs ({error}), a batch needs, too: pip install 'nanoserve[serve]'"
        raise ValueError(told) from error
    if args.replicas > 1 or args.ray_address:
        try:
            import ray.data  # noqa: F401
        except ModuleNotFoundError as error:
            told = f"replicas={args.replicas} need Ray ({error}): pip install 'nanoserve[ray]'"
            raise ValueError(told) from error


def _one_of(name: str, by_place: str | None, by_flag: str | None) -> str:
    given = [value for value in (by_place, by_flag) if value is not None]
    require(len(given) == 1, f"{name} is given {len(given)} times: it takes IN and OUT, two files")
    return given[0]


def _parser() -> ArgumentParser:
    parser = Parser(
        prog="nanoserve batch",
        description="Answer the requests of a file, in OpenAI's batch format. Whatever ends it, "
        "the same command goes on: what OUT has is not computed again.",
        epilog="Exit status: 0 all answered, 1 some lines were wrong, 2 it has not come to its end",
    )
    add = parser.add_argument
    add("input", nargs="?", metavar="IN", help="a JSON object a line: custom_id, method, url, body")
    add("output", nargs="?", metavar="OUT", help="gets a line for each, as they are answered")
    add("-i", "--input-file", metavar="IN", help="the same, as vLLM's run-batch has it")
    add("-o", "--output-file", metavar="OUT", help="the same")
    add("--model", default="tiny-qwen3", help="folder, file or name, as for LLM() (%(default)s)")
    several = "engines; more than one run on Ray, and need nanoserve[ray]"
    names = ("--replicas", "--data-parallel-size", "-dp")
    add(*names, type=int, default=1, metavar="N", help=several)
    add("--ray-address", metavar="ADDRESS", help="of a Ray cluster (one on this machine)")
    grace = "to end what runs, after SIGTERM or Ctrl-C (%(default)s)"
    add("--grace-period", type=float, default=30, metavar="S", help=grace)
    add("--served-model-name", action=Words, metavar="NAME", help="that requests may use")
    tools = "how the model writes calls: hermes, llama3_json, mistral (as its template shows)"
    add("--tool-call-parser", metavar="NAME", help=tools)
    thoughts = "split off what the model thinks before it answers: qwen3, deepseek_r1"
    add("--reasoning-parser", metavar="NAME", help=thoughts)
    kwargs = "what templates get if a request says nothing of it, as '{\"enable_thinking\": false}'"
    add("--default-chat-template-kwargs", type=from_json, metavar="JSON", help=kwargs)
    process = "run the engine in a process of its own (%(default)s)"
    add("--engine-process", action=BooleanOptionalAction, default=True, help=process)
    add_engine_flags(parser, but=_OURS)
    return parser
