"""A conversation, and the commands that change it."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from nanoserve.cli.chat.backend import FAILURES, Backend, Messages
from nanoserve.cli.chat.display import Answer, faint, show, status
from nanoserve.cli.chat.lines import history, is_interactive, read_question
from nanoserve.cli.chat.parameters import SETTABLE, checked_name, checked_value
from nanoserve.cli.chat.saved import save

HELP = """\
/help                 list these commands
/reset                begin a new conversation (also /new)
/system [TEXT]        set the system prompt, or show it
/set [NAME [VALUE]]   set a sampling parameter such as temperature, or show what is set
/unset NAME           use the default of a parameter again, or no system prompt
/save FILE            save the conversation as JSON, which the server's page can import
/exit                 end (also Ctrl-D)
A line that ends with \\ goes on in the next one; \"\"\" begins and ends a text of several lines.
Ctrl-C stops an answer."""

_COMMAND = re.compile(r"/[a-z]+")


class EndOfChat(Exception):
    """The user has ended the chat."""


@dataclass
class Session:
    """A conversation with a model.

    parameters: sampling parameters that differ from the model's defaults.
    """

    backend: Backend
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: Messages = field(default_factory=list)
    saved_to: set[Path] = field(default_factory=set)  # files that may be overwritten
    id: str = field(default_factory=lambda: uuid4().hex)

    def ask(self, question: str) -> Answer:
        """Print the model's answer and keep both. A question without an answer is dropped."""
        self.messages.append({"role": "user", "content": question})
        beginning = [{"role": "system", "content": self.system}] if self.system else []
        answer = Answer()
        try:
            conversation = [*beginning, *self.messages]
            show(self.backend.reply(conversation, self.parameters, answer.usage), answer)
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
        return answer

    def command(self, line: str) -> str:
        """Run a command, and return what to say about it. Raises `ValueError` if it is wrong."""
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/reset": self._reset,
            "/new": self._reset,
            "/system": self._system,
            "/set": self._set,
            "/unset": self._unset,
            "/save": self._save,
            "/exit": self._exit,
            "/quit": self._exit,
        }
        if name not in commands:
            raise ValueError(f"unknown command {name}; /help lists the commands")
        return commands[name](rest.strip())

    def _exit(self, _: str) -> str:
        raise EndOfChat

    def _reset(self, _: str) -> str:
        self.messages.clear()
        self.id = uuid4().hex
        return "a new conversation"

    def _system(self, text: str) -> str:
        self.system = text or self.system
        return f"system prompt: {self.system}" if self.system else "no system prompt"

    def _set(self, rest: str) -> str:
        name, _, text = rest.partition(" ")
        if not name:
            names = self.parameters or {"no parameters": "the model's defaults"}
            return "\n".join(_shown(*item) for item in names.items())
        name = checked_name(name)
        if text.strip():
            self.parameters[name] = checked_value(name, text.strip())
        return _shown(name, self.parameters.get(name, "default"))

    def _unset(self, name: str) -> str:
        if name == "system":
            self.system = None
            return "no system prompt"
        name = checked_name(name)
        self.parameters.pop(name, None)
        return _shown(name, "default")

    def _save(self, name: str) -> str:
        if not name:
            raise ValueError("/save needs the name of a file")
        extra = {"model": self.backend.name, "system": self.system, "parameters": self.parameters}
        path = Path(name).expanduser().absolute()
        if path.exists() and path not in self.saved_to:
            raise ValueError(f"{path} exists; choose another name")
        save(path, self.id, self.messages, extra)
        self.saved_to.add(path)
        return f"saved to {path}"


def _shown(name: str, value: Any) -> str:
    is_parameter = name in SETTABLE and value != "default"
    return f"{name}: {json.dumps(value) if is_parameter else value}"


def converse(session: Session, history_path: Path | None = None) -> None:
    """Read questions and commands, and answer them, until the input ends.

    On a terminal an error is shown, and the conversation goes on. In a pipe, it is raised.
    """
    is_terminal = is_interactive()
    if is_terminal:
        print(f"{session.backend.name}: /help lists the commands, and Ctrl-D ends the chat.")
    with history(history_path) if is_terminal else nullcontext():
        while (line := read_question()) is not None:
            try:
                _take(session, line, is_terminal)
            except EndOfChat:
                return
            except FAILURES as error:
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
        if is_terminal:
            print()


def _take(session: Session, line: str, is_terminal: bool) -> None:
    """Run a command or ask a question. A path such as /usr/bin is no command."""
    word = line.partition(" ")[0]
    if _COMMAND.fullmatch(word):
        text = session.command(line)
        if is_terminal or word == "/help" or line in ("/system", "/set"):
            print(text)
    elif line:
        answer = session.ask(line)
        if is_terminal and sys.stdout.isatty():
            print(faint(status(answer, session.backend.max_model_len)))
