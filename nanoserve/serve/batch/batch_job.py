"""What has come of a job so far: written, counted, shown."""

import sys
import time
from pathlib import Path

from tqdm import tqdm

from nanoserve.serve.batch.output_file import AnswersFile
from nanoserve.serve.batch.request_executor import Answered
from nanoserve.serve.batch.resume import Survey

_SECONDS = 10.0  # between two lines of progress, where there is no terminal to draw a bar on


class Job:
    """Takes what was answered, in whichever order it comes."""

    def __init__(self, path: Path, answers: AnswersFile, found: Survey) -> None:
        self._path, self._answers, self._found = path, answers, found
        self.num_answered = self.num_refused = self.num_failed = 0  # in this run
        self._start = time.monotonic()
        self._first = self._last = 0.0  # when there was something to show
        self._total = found.num_answered + len(found.todo)
        self._bar = None
        if sys.stderr.isatty():
            before = found.num_answered
            self._bar = tqdm(total=self._total, initial=before, unit="line", dynamic_ncols=True)

    def take(self, answered: Answered) -> None:
        """Raises `OSError` if it cannot be written."""
        if answered.content:
            self._answers.append(answered.content)
            self.num_answered += 1
        if answered.told:
            self.num_failed += not answered.content
            self.num_refused += bool(answered.content)
            tqdm.write(f"{self._path}:{answered.number}: {answered.told}", file=sys.stderr)
        self._show()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def is_good(self) -> bool:
        """Whether every line got the answer that it asked for, now or before."""
        wrong = self._found.num_bad + self._found.num_refused + self.num_refused + self.num_failed
        return wrong == 0

    def summary(self) -> str:
        """For the end, in one line."""
        before, seconds = self._found.num_answered, time.monotonic() - self._start
        told = f"{self._answers.path}: {before + self.num_answered:,} answers"
        if before:
            told += f", {before:,} of them from before"
        refused = self.num_refused + self._found.num_refused
        for number, what in (
            (refused, "of them errors"),
            (self._found.num_bad, "bad lines without one"),
            (self.num_failed, "lines failed, to be tried again by the next run"),
        ):
            told += f", {number:,} {what}" if number else ""
        return f"{told}; {seconds:.1f} s, {self.num_answered / max(seconds, 1e-9):.0f} lines/s"

    def _show(self) -> None:
        now, num_done = time.monotonic(), self.num_answered + self.num_failed
        self._first, self._last = self._first or now, self._last or now
        if self._bar is not None:
            self._bar.update()
        elif now - self._last >= _SECONDS:
            self._last = now
            rate = num_done / (now - self._first)  # an engine may take minutes to load
            left = (len(self._found.todo) - num_done) / rate
            done = self._found.num_answered + num_done
            told = f"{done:,} of {self._total:,} lines, {rate:.0f} lines/s, {left:.0f} s left"
            print(told, file=sys.stderr, flush=True)
