"""`nanoserve chat`: the answers of the model, line by line."""

import io
import json
import os
import re
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve.cli.chat import lines, session
from nanoserve.cli.chat.backend import Messages, Piece, Usage, _pieces_of
from nanoserve.cli.chat.display import Answer, status
from nanoserve.cli.chat.session import Session
from nanoserve.cli.main import main


def say(monkeypatch, capsys, lines: str, *arguments: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Answers to two questions in one conversation, and to the second one alone."""
    from nanoserve import LLM, SamplingParams  # not at the top: the terminal's test needs no torch

    params = SamplingParams(temperature=0, max_tokens=30)
    first = [{"role": "user", "content": "What is a KV cache?"}]
    second = {"role": "user", "content": "2 + 3?"}
    with LLM("tiny-qwen3") as llm:

        def answer(messages) -> str:
            return llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text

        one = answer(first)
        two = answer([*first, {"role": "assistant", "content": one}, second])
        return [one, two, answer([second])]


def test_a_conversation_has_a_memory_until_a_new_one_begins(monkeypatch, capsys, expected) -> None:
    lines = "What is a KV cache?\n\n2 + 3?\n/new\n2 + 3?\n/exit\nnot asked any more\n"
    out = say(monkeypatch, capsys, lines, "--temperature", "0", "--max-tokens", "30")
    assert out == "".join(f"{text}\n" for text in expected)


def test_a_server_answers_the_same(monkeypatch, capsys, expected) -> None:
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    from serving import served

    from nanoserve import AsyncLLM

    llm = AsyncLLM("tiny-qwen3")
    try:
        with served(llm, api_key=["key"]) as server:
            asked = ["--url", server.url, "--temperature", "0", "--max-tokens", "30"]
            lines = "What is a KV cache?\n2 + 3?\n/new\n2 + 3?\n"
            out = say(monkeypatch, capsys, lines, *asked, "--api-key", "key")
            assert out == "".join(f"{text}\n" for text in expected)
            assert main(["chat", *asked]) == 1
            assert "answers 401" in capsys.readouterr().err
            assert main(["chat", *asked, "--block-size", "8"]) == 1
            assert "block_size" in capsys.readouterr().err
    finally:
        llm.shutdown()


class Scripted:
    """A model that gives these answers, and notes the requests."""

    name, max_model_len = "scripted", 100

    def __init__(self, *answers: Any) -> None:
        self.left, self.asked = list(answers), []

    def reply(self, messages: Messages, parameters: Any, usage: Usage) -> Iterator[Piece]:
        self.asked.append(([message["content"] for message in messages], dict(parameters)))
        answer = self.left.pop(0)
        for number, word in enumerate(answer):
            if isinstance(word, BaseException):
                raise word
            usage.prompt_tokens, usage.completion_tokens = 7, number + 1
            yield Piece(word)


def converse(monkeypatch, model: Scripted, lines: str, **settings: Any) -> Session:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    conversation = Session(model, **settings)
    session.converse(conversation)
    return conversation


def test_a_ctrl_c_stops_the_answer_and_not_the_conversation(monkeypatch, capsys) -> None:
    model = Scripted(["half an", KeyboardInterrupt()], [KeyboardInterrupt()], ["yes"])
    converse(monkeypatch, model, "a\nb\nc\n", system="Be short.")
    assert capsys.readouterr().out == "half an ...\n ...\nyes\n"
    contents = [contents for contents, _ in model.asked]
    assert contents[1:] == [["Be short.", "a", "half an", last] for last in "bc"]


def test_commands_change_the_conversation(monkeypatch, capsys, tmp_path) -> None:
    model = Scripted(*[["yes"]] * 4)
    file = tmp_path / "saved.json"
    lines = f"""one
/set temperature 0.5
/set top-k 7
/set stop END
/system Be kind.
/usr/bin is a path
/unset temperature
/unset system
/save {file}
three
/save {file}
/reset
four
/set
/system
/quit
five
"""
    converse(monkeypatch, model, lines)
    first = ["one", "yes", "/usr/bin is a path"]
    assert model.asked == [
        (["one"], {}),
        (["Be kind.", *first], {"temperature": 0.5, "top_k": 7, "stop": "END"}),
        ([*first, "yes", "three"], {"top_k": 7, "stop": "END"}),
        (["four"], {"top_k": 7, "stop": "END"}),
    ]
    assert capsys.readouterr().out.splitlines()[4:] == [
        "top_k: 7",
        'stop: "END"',
        "no system prompt",
    ]
    saved = json.loads(file.read_text("utf-8"))
    (conversation,) = saved["conversations"]
    assert saved["format"] == "nanoserve.conversations" and conversation["title"] == "one"
    assert conversation["parameters"] == {"top_k": 7, "stop": "END"}
    parents = [(message["id"], message["parent"]) for message in conversation["messages"]]
    assert parents == [(1, None), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5)]
    assert conversation["leaf"] == 6


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/wrong", "/help lists"),
        ("/set temprature 1", "did you mean temperature"),
        ("/set temperature hot", "temperature"),
        ("/set temperature -1", "-1"),
        ("/set n 2", "'n' is not one of the parameters"),
        ("/unset tools", "'tools'"),
        ("/save", "needs the name of a file"),
        ("/save {existing}", "exists"),
        ("/save {existing}/a.json", "existing"),
    ],
)
def test_a_wrong_command_ends_a_script_before_the_next_question(
    monkeypatch, tmp_path, line: str, problem: str
) -> None:
    (tmp_path / "existing").write_text("mine")
    model = Scripted()
    with pytest.raises((ValueError, OSError), match=re.escape(problem)):
        converse(monkeypatch, model, line.format(existing=tmp_path / "existing") + "\none\n")
    assert model.asked == [] and (tmp_path / "existing").read_text() == "mine"


@pytest.mark.parametrize(
    ("lines", "questions"),
    [
        ("a\\\n b\\\nc\nd\n", ["a\n b\nc", "d"]),
        ('"""a\n\n/reset\nb"""\nc\n', ["a\n\n/reset\nb", "c"]),
        ('"""a"""\n"""\nb\n"""\n', ["a", "b"]),
        ("a\\", ["a"]),
        ('"""a\nb', ["a\nb"]),
        (" \n\n a \n", ["a"]),
        ("\\\n\n", []),
    ],
)
def test_a_question_may_have_several_lines(monkeypatch, lines: str, questions: list[str]) -> None:
    model = Scripted(*[["yes"]] * len(questions))
    converse(monkeypatch, model, lines)
    assert [contents[-1] for contents, _ in model.asked] == questions


def test_parameters_of_the_command_line_are_checked_before_loading(capsys) -> None:
    assert main(["chat", "no/such/model", "--top-p", "3"]) == 1
    assert "top_p=3" in capsys.readouterr().err


def test_a_status_says_what_is_known() -> None:
    answer = Answer(num_pieces=3, first=1.25)
    assert status(answer, 10) == "about 3 tokens, first after 1.2 s"
    answer.usage = Usage(5, 4)
    answer.last = 1.5
    assert status(answer, None) == "4 tokens, 2 tokens/s, first after 1.2 s, context 9"


def test_events_of_other_servers_are_understood() -> None:
    usage = Usage()
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": None},
        {"choices": [{"delta": {"reasoning": "hm", "content": "yes"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
    ]
    pieces = [piece for event in events for piece in _pieces_of(event, usage)]
    assert [(piece.text, piece.is_reasoning) for piece in pieces] == [
        ("hm", True),
        ("hm", True),
        ("yes", False),
    ]
    assert usage == Usage(5, 2)
    for error in ({"message": "on fire"}, "on fire"):
        with pytest.raises(ValueError, match="on fire"):
            list(_pieces_of({"error": error}, usage))


# ---------------------------------------------------------------- on a terminal

TERMINAL = """
import sys
sys.path[:0] = {path!r}
from test_chat_command import Scripted
from nanoserve.cli.chat import lines, session
answers = [["a", "b"], ["half", KeyboardInterrupt()], [ValueError("on fire")], ["c"]]
model = Scripted(*answers)
session.converse(session.Session(model), lines.history_file())
print("asked", [contents[-1] for contents, _ in model.asked])
"""


class Terminal:
    """A program that is run on a pseudo-terminal."""

    def __init__(self, script: str, **environment: str) -> None:
        import pty
        import subprocess

        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", **environment}
        self._process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str, start: int = 0) -> int:
        """Read until `text` is seen at or after `start`; returns the position behind it."""
        while text not in self.seen[start:]:
            assert self._read(), self.seen
        return self.seen.index(text, start) + len(text)

    def _read(self) -> bool:
        """Wait for more text; return False if there is none, as the program has ended."""
        assert select.select([self._ours], [], [], 60)[0], self.seen
        try:
            text = os.read(self._ours, 10_000).decode()
        except OSError:  # of Linux, where macOS returns nothing
            text = ""
        self.seen += text
        return text != ""

    def type(self, *lines: str) -> None:
        """Type each line when the prompt has appeared."""
        for line in lines:
            start = self.wait_for("> ", getattr(self, "_at", 0))
            os.write(self._ours, f"{line}\n".encode())
            self._at = self.wait_for("\n", start)

    def end(self) -> int:
        self.wait_for("> ", self._at)
        os.write(self._ours, b"\x04")
        while self._read():
            pass
        code = self._process.wait(60)
        os.close(self._ours)
        return code


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_has_prompts_a_status_errors_and_a_history(tmp_path) -> None:
    pytest.importorskip("readline", reason="this Python is built without readline")
    script = TERMINAL.format(path=[str(Path(__file__).parent), *sys.path])
    terminal = Terminal(script, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1")
    terminal.type("/help", "one\\\ntwo", "/wrong", "three", "four", "\x1b[A")  # the last: up, Enter
    assert terminal.end() == 0
    seen = terminal.seen.replace("\r\n", "\n")
    assert "scripted: /help lists the commands" in seen and "/unset NAME" in seen
    assert re.search(r"\nab\n2 tokens, .*first after \d+ ms, context 9 of 100 \(9 %\)\n", seen)
    assert "error: unknown command /wrong" in seen and "error: on fire" in seen
    assert "half ...\n" in seen
    assert "asked ['one\\ntwo', 'three', 'four', 'four']" in seen
    file = tmp_path / "nanoserve" / "chat_history"
    typed = file.read_text().splitlines()
    assert typed == ["/help", "one\\", "two", "/wrong", "three", "four"]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.size("full")
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_the_command_on_a_terminal_with_a_model(tmp_path) -> None:
    script = (
        "from nanoserve.cli.main import main\n"
        "code = main(['chat', '--temperature', '0', '--num-kv-blocks', '200'])\n"
        "print('asked', code)"
    )
    terminal = Terminal(script, XDG_STATE_HOME=str(tmp_path / "no" / "folder"))
    terminal.type("What is 27 + 45?", "/set max_tokens 3", "What is a KV cache?")
    assert terminal.end() == 0
    assert "27 + 45 = 72." in terminal.seen and "of 2,048 (" in terminal.seen
    assert "\x1b[2m3 tokens, " in terminal.seen


def test_a_history_that_cannot_be_stored_is_no_error(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("readline", reason="this Python is built without readline")
    (tmp_path / "nanoserve").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with lines.history(lines.history_file()):
        pass
    assert "questions are not stored" in capsys.readouterr().err
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert lines.history_file().parts[-4:-1] == (".local", "state", "nanoserve")
