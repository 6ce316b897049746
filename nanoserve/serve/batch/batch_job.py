"""The progress of a batch job, which writes, counts and shows its answers."""

import sys
import time
from pathlib import Path

from tqdm import tqdm

from nanoserve.serve.batch.output_file import AnswersFile
from nanoserve.serve.batch.request_executor import Answered
from nanoserve.serve.batch.resume import Survey

_SECONDS = 10.0  # between two progress messages, if stderr is not a terminal with a progress bar


class Job:
    """A running batch job. Answers may arrive in any order."""

    def __init__(self, path: Path, answers: AnswersFile, found: Survey) -> None:
        self._path, self._answers, self._found = path, answers, found
        self.num_answered = self.num_refused = self.num_failed = 0  # in this run
        self._start = time.monotonic()
        self._first = self._last = 0.0  # times of the first answer and of the last message
        self._total = found.num_answered + len(found.todo)
        self._bar = None
        if sys.stderr.isatty():
            before = found.num_answered
            self._bar = tqdm(total=self._total, initial=before, unit="line", dynamic_ncols=True)

    def take(self, answered: Answered) -> None:
        """Write and count an answer. Raises `OSError` if it cannot be written."""
        if answered.content:
            self._answers.append(answered.content)
            self.num_answered += 1
        if answered.error:
            self.num_failed += not answered.content
            self.num_refused += bool(answered.content)
            tqdm.write(f"{self._path}:{answered.number}: {answered.error}", file=sys.stderr)
        self._show()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def is_good(self) -> bool:
        """True if every line has an answer without an error, from this run or an earlier one."""
        wrong = self._found.num_bad + self._found.num_refused + self.num_refused + self.num_failed
        return wrong == 0

    def summary(self) -> str:
        """Return the final summary of the job, in one line."""
        before, seconds = self._found.num_answered, time.monotonic() - self._start
        message = f"{self._answers.path}: {before + self.num_answered:,} answers"
        if before:
            message += f", {before:,} of them from earlier runs"
        refused = self.num_refused + self._found.num_refused
        for number, what in (
            (refused, "of them errors"),
            (self._found.num_bad, "invalid lines without one"),
            (self.num_failed, "lines failed and will be retried by the next run"),
        ):
            message += f", {number:,} {what}" if number else ""
        return f"{message}; {seconds:.1f} s, {self.num_answered / max(seconds, 1e-9):.0f} lines/s"

    def _show(self) -> None:
        now, num_done = time.monotonic(), self.num_answered + self.num_failed
        self._first, self._last = self._first or now, self._last or now
        if self._bar is not None:
            self._bar.update()
        elif now - self._last >= _SECONDS:
            self._last = now
            rate = num_done / (now - self._first)  # not from the start: loading may take minutes
            left = (len(self._found.todo) - num_done) / rate
            done = self._found.num_answered + num_done
            message = f"{done:,} of {self._total:,} lines, {rate:.0f} lines/s, {left:.0f} s left"
            print(message, file=sys.stderr, flush=True)
