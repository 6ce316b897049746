"""`nanoserve batch IN OUT` answers a file of requests, and resumes an interrupted run."""

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

# Flags of this command that share their name with an engine option of vLLM.
_OURS = ("served_model_name", "reasoning_parser", "data_parallel_size")
_SETTINGS = (
    *("served_model_name", "tool_call_parser", "reasoning_parser"),
    *("default_chat_template_kwargs", "lora_modules"),
)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status.

    0: every request has been answered. 1: the run is complete, but some lines were invalid.
    2: the run could not be started or completed. 130: stopped by Ctrl-C. 143: stopped by SIGTERM.
    """
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
    require(not is_same, f"{out} is the input file; pass another file for the answers")
    _check_packages(args)
    from nanoserve.serve.batch.batch_job import Job
    from nanoserve.serve.batch.output_file import AnswersFile
    from nanoserve.serve.batch.resume import survey

    def report(number: int, message: str) -> None:
        print(f"{path}:{number}: {message}", file=sys.stderr)

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
        print("stopped; run the same command again to resume", file=sys.stderr)
        return 128 + stopped_by  # the convention of shells
    return 0 if job.is_good else 1


def _answer(
    args: Namespace, path: Path, salt: str, todo: "Todo", job: "Job", options: dict[str, Any]
) -> int:
    """Answer the requests `todo`. Returns the signal that stopped the run, or 0."""
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
        message = f"a batch needs the server's packages ({error}): pip install 'nanoserve[serve]'"
        raise ValueError(message) from error
    if args.replicas > 1 or args.ray_address:
        try:
            import ray.data  # noqa: F401
        except ModuleNotFoundError as error:
            message = f"replicas={args.replicas} needs Ray ({error}): pip install 'nanoserve[ray]'"
            raise ValueError(message) from error


def _one_of(name: str, by_place: str | None, by_flag: str | None) -> str:
    given = [value for value in (by_place, by_flag) if value is not None]
    require(len(given) == 1, f"{name} is set {len(given)} times; pass IN and OUT once each")
    return given[0]


def _parser() -> ArgumentParser:
    parser = Parser(
        prog="nanoserve batch",
        description="Answer a file of requests in OpenAI's batch format. The same command resumes "
        "an interrupted run; answers that are in OUT are not computed again.",
        epilog="Exit status: 0 if all requests were answered, 1 if some lines were invalid, 2 if "
        "the run could not be completed.",
    )
    add = parser.add_argument
    input_file = "File with one JSON object per line: custom_id, method, url, body."
    add("input", nargs="?", metavar="IN", help=input_file)
    add("output", nargs="?", metavar="OUT", help="File for the answers, one per line.")
    add("-i", "--input-file", metavar="IN", help="IN, as a flag like in vLLM's run-batch.")
    add("-o", "--output-file", metavar="OUT", help="OUT, as a flag like in vLLM's run-batch.")
    model = "Folder, file or name of the model, as for LLM(). Default: %(default)s."
    add("--model", default="tiny-qwen3", help=model)
    several = "Number of engines; more than one run on Ray (nanoserve[ray]). Default: %(default)s."
    names = ("--replicas", "--data-parallel-size", "-dp")
    add(*names, type=int, default=1, metavar="N", help=several)
    cluster = "Address of a Ray cluster. Default: a cluster is started on this machine."
    add("--ray-address", metavar="ADDRESS", help=cluster)
    grace = "Seconds for running requests to end after SIGTERM or Ctrl-C. Default: %(default)s."
    add("--grace-period", type=float, default=30, metavar="S", help=grace)
    names_help = "Model names that requests may use. Default: the value of --model."
    add("--served-model-name", action=Words, metavar="NAME", help=names_help)
    lora = "LoRA adapters that requests may use as model, as NAME=PATH; needs --enable-lora. "
    add("--lora-modules", action=Words, metavar="NAME=PATH", help=f"{lora}Default: none.")
    tools = "Format of tool calls, as for nanoserve serve. Default: from the template."
    add("--tool-call-parser", metavar="NAME", help=tools)
    thoughts = "Format of reasoning to split off an answer, as for nanoserve serve. "
    thoughts += "Default: none, or the one that the format of calls implies."
    add("--reasoning-parser", metavar="NAME", help=thoughts)
    kwargs = "Defaults for chat_template_kwargs, as '{\"enable_thinking\": false}'. Default: none."
    add("--default-chat-template-kwargs", type=from_json, metavar="JSON", help=kwargs)
    process = "Run the engine in a separate process. Default: %(default)s."
    add("--engine-process", action=BooleanOptionalAction, default=True, help=process)
    add_engine_flags(parser, but=_OURS)
    return parser
