"""Runs of pytest in which everything of ours is imported anew, a tenth of a second each.

`python forked_pytest.py` has imported pytest, and forks a process for each line that it reads.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# As the museum's reader has it, but in one process and without plugins, whose import takes longer
# than most of the tests. The import mode is the project's own.
OPTIONS = ["-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", "--import-mode=importlib"]
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONUTF8": "1"}


class ForkedPytest:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, folder: Path, *arguments: str) -> tuple[int, str]:
        """pytest's exit status and what it printed, in a folder whose modules come first."""
        self._process.stdin.write(json.dumps([str(folder), arguments]) + "\n")
        self._process.stdin.flush()
        status, printed = json.loads(self._process.stdout.readline())
        return status, printed


@contextlib.contextmanager
def forked_pytest() -> Iterator[ForkedPytest]:
    environment = {**os.environ, **ENVIRONMENT, "COLUMNS": "100"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, env=environment, encoding="utf-8", **pipes) as process:
        yield ForkedPytest(process)
        process.stdin.close()  # it ends, and is waited for


def main() -> None:
    import numpy  # noqa: F401
    import pytest

    if find_spec("triton") is not None:  # which the suite's conftest imports
        import triton.runtime.interpreter  # noqa: F401
    gc.freeze()  # what is imported here, no child looks through
    for line in sys.stdin:
        folder, arguments = json.loads(line)
        with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
            child = os.fork()
            if child == 0:
                status = 70  # of an error that pytest does not catch
                try:
                    os.dup2(printed.fileno(), 1)
                    os.dup2(printed.fileno(), 2)
                    os.chdir(folder)
                    sys.path.insert(0, folder)
                    # What is written in the same second as the bytecode would not be seen.
                    sys.dont_write_bytecode = True
                    status = int(pytest.main([*OPTIONS, *arguments]))
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            _, ended = os.waitpid(child, 0)
            printed.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(ended), printed.read()]), flush=True)


if __name__ == "__main__":
    main()
