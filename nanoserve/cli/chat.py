"""`nanoserve chat MODEL`: a conversation in the terminal, with a model here or on a server."""

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.parser import Parser, add_model, model_of
from nanoserve.utils.parameter_table import PARAMETERS

Messages = list[dict[str, str]]
Answer = Callable[[Messages], Iterator[str]]  # the pieces of an answer, as they come

_HELP = "/new begins a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"
_FLAGS = {name: row.flag for name, row in PARAMETERS.items() if row.flag is not None}


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    args.model = model_of(args)
    with contextlib.ExitStack() as closing:
        answer = _remote(args) if args.url else _local(args, closing)
        converse(answer, args.system)
    return 0


def converse(answer: Answer, system: str | None) -> None:
    """Read lines and answer them until there are no more."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages, is_terminal = list(beginning), sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history)
        print(_HELP)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line == "/new":
            messages = list(beginning)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _show(answer(messages))})


def _show(pieces: Iterator[str]) -> str:
    """Print an answer while it comes; all of it, or as much as there was before a Ctrl-C."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print()
    return text


def _local(args: Namespace, closing: contextlib.ExitStack) -> Answer:
    from nanoserve.llm import LLM

    options = engine_options(args)
    options.pop("seed", None)  # that of the answers has the same name
    llm = closing.enter_context(LLM(args.model or "tiny-qwen3", **options))
    # Without max_tokens, an answer may be as long as there is room.
    changes = {"max_tokens": None, **_given(args)}
    params = replace(llm.get_default_sampling_params(), **changes)

    def answer(messages: Messages) -> Iterator[str]:
        for output in llm.stream(messages, params):
            yield output.outputs[0].text

    return answer


def _remote(args: Namespace) -> Answer:
    """Any server that speaks OpenAI's protocol, with what the standard library has."""
    engine = sorted({*engine_options(args)} - {"seed"})
    if engine:
        raise ValueError(f"{engine} are for a model here, and --url={args.url} names a server")
    base = args.url.rstrip("/").removesuffix("/v1") + "/v1"
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{base}{path}", content, headers)
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            told = error.read(10_000).decode(errors="replace")
            raise ValueError(f"{base} answers {error.code}: {told}") from error

    with ask("/models") as told:
        model = args.model or json.load(told)["data"][0]["id"]

    def answer(messages: Messages) -> Iterator[str]:
        body = {"model": model, "messages": messages, "stream": True, **_given(args)}
        with ask("/chat/completions", body) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"].get("message", event["error"]))
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""

    return answer


def _given(args: Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in _FLAGS if name in args}


def _parser() -> ArgumentParser:
    parser = Parser(prog="nanoserve chat", description="Talk to a model.", epilog=_HELP)
    add = parser.add_argument
    model = "folder, file or name, as for LLM() (tiny-qwen3; of a server, its first)"
    add_model(parser, model)
    add("--url", help="a server that speaks OpenAI's protocol, instead of a model here")
    add("--api-key", metavar="KEY", help="of that server (OPENAI_API_KEY)")
    add("--system", metavar="TEXT", help="the system prompt")
    for name, kind in _FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=kind, default=SUPPRESS, metavar="X", help="as the checkpoint recommends")
    add_engine_flags(parser, but=("seed",))
    return parser
