"""Reads questions from a terminal, or from a pipe or file. A question may have several lines."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PROMPT, CONTINUED = "> ", ". "
QUOTES = '"""'

_MOST_LINES = 1000  # in the history


def is_interactive() -> bool:
    """Return True if a person types the questions."""
    return sys.stdin.isatty()


def read_question() -> str | None:
    r"""Return the next question; None at the end of the input.

    A line that ends with a backslash goes on in the next one. Triple quotes begin and end a text of
    several lines. Ctrl-C while one of these is typed discards it.
    """
    is_terminal = is_interactive()
    try:
        line = input(PROMPT if is_terminal else "")
    except (EOFError, KeyboardInterrupt):
        return None
    try:
        return _rest_of(line, CONTINUED if is_terminal else "")
    except KeyboardInterrupt:
        print()
        return ""


def _rest_of(line: str, prompt: str) -> str:
    """Return the whole question whose first line is `line`. The end of the input ends it, too."""
    lines = [line]
    with contextlib.suppress(EOFError):
        if line.lstrip().startswith(QUOTES):
            lines = [line.lstrip().removeprefix(QUOTES)]
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(input(prompt))
            lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(input(prompt))
    return "\n".join(lines).strip()


def history_file() -> Path:
    """Return the file of the history, in the user's folder for state (XDG)."""
    given = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return folder / "nanoserve" / "chat_history"


@contextlib.contextmanager
def history(path: Path | None) -> Iterator[None]:
    """Read earlier questions, for the arrow keys, from a file that only the user can read.

    On leaving, the new questions are appended to it. Without a file, or without readline, there is
    no history of earlier conversations.
    """
    try:
        import readline
    except ImportError:  # as on Windows
        yield
        return
    readline.clear_history()
    if path is not None:
        path = _loaded(readline, path)
    num_known = readline.get_current_history_length()
    try:
        yield
    finally:
        num_new = readline.get_current_history_length() - num_known
        if path is not None and num_new > 0:
            _append(readline, path, num_new)


def _loaded(readline: ModuleType, path: Path) -> Path | None:
    """Load the history, and create its file. Returns None if that is impossible."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        readline.read_history_file(path)
    except OSError as error:
        print(f"questions are not stored: {error}", file=sys.stderr)
        return None
    return path


def _append(readline: ModuleType, path: Path, num_new: int) -> None:
    readline.set_history_length(_MOST_LINES)
    try:
        if hasattr(readline, "append_history_file"):  # other sessions may have added theirs
            readline.append_history_file(num_new, path)
        else:
            readline.write_history_file(path)
    except OSError as error:
        print(f"questions are not stored: {error}", file=sys.stderr)
