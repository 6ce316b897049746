"""`nanoserve chat MODEL` is a conversation in the terminal with a local model or a server."""

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
Answer = Callable[[Messages], Iterator[str]]  # pieces of an answer, as they are generated

_HELP = "/new begins a new conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."
_HELP_OF = {
    "temperature": "Sampling temperature; 0 is greedy. Default: as the checkpoint recommends.",
    "top_k": "Sample from the k most likely tokens. Default: as the checkpoint recommends.",
    "top_p": "Sample from the most likely tokens that have probability p together. Default: as the "
    "checkpoint recommends.",
    "seed": "Seed of the answers. Default: the engine's seed, 0.",
    "max_tokens": "Maximum number of tokens in an answer. Default: as many as the context has room "
    "for.",
}
_FLAGS = {name: row.flag for name, row in PARAMETERS.items() if row.flag is not None}


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    args.model = model_of(args)
    with contextlib.ExitStack() as closing:
        answer = _remote(args) if args.url else _local(args, closing)
        converse(answer, args.system)
    return 0


def converse(answer: Answer, system: str | None) -> None:
    """Read lines and print the model's answers until the input ends."""
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
    """Print an answer while it is generated. Returns its text, which Ctrl-C cuts short."""
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
    options.pop("seed", None)  # --seed is the seed of the answers, not the engine's
    llm = closing.enter_context(LLM(args.model or "tiny-qwen3", **options))
    # An answer may be as long as the context allows, unless --max-tokens is given.
    changes = {"max_tokens": None, **_given(args)}
    params = replace(llm.get_default_sampling_params(), **changes)

    def answer(messages: Messages) -> Iterator[str]:
        for output in llm.stream(messages, params):
            yield output.outputs[0].text

    return answer


def _remote(args: Namespace) -> Answer:
    """Return a function that sends messages to an OpenAI-compatible server.

    It uses the standard library only.
    """
    engine = sorted({*engine_options(args)} - {"seed"})
    if engine:
        raise ValueError(
            f"{engine} are options of a local model, but --url={args.url} is a server; remove "
            "either the options or --url"
        )
    base = args.url.rstrip("/").removesuffix("/v1") + "/v1"
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"

    def send(path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{base}{path}", content, headers)
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            message = error.read(10_000).decode(errors="replace")
            raise ValueError(f"{base} answers {error.code}: {message}") from error

    with send("/models") as response:
        model = args.model or json.load(response)["data"][0]["id"]

    def answer(messages: Messages) -> Iterator[str]:
        body = {"model": model, "messages": messages, "stream": True, **_given(args)}
        with send("/chat/completions", body) as lines:
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
    parser = Parser(prog="nanoserve chat", description="Chat with a model.", epilog=_HELP)
    add = parser.add_argument
    model = (
        "Folder, file or name of the model, as for LLM(). Default: tiny-qwen3, or the first model "
        "of the server."
    )
    add_model(parser, model)
    url = "Chat with this OpenAI-compatible server. Default: a local model."
    add("--url", help=url)
    key = "API key of the server. Default: the environment variable OPENAI_API_KEY."
    add("--api-key", metavar="KEY", help=key)
    add("--system", metavar="TEXT", help="System prompt. Default: none.")
    for name, kind in _FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=kind, default=SUPPRESS, metavar="X", help=_HELP_OF[name])
    add_engine_flags(parser, but=("seed",))
    return parser
