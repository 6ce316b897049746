"""Survey the input for lines to answer and invalid lines, before anything is computed."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nanoserve.serve.batch.output_file import AnswersFile
from nanoserve.serve.batch.requests import Todo, key_of, key_of_answer, parse, read_lines


class Survey(NamedTuple):
    todo: Todo
    num_answered: int  # by runs before this one
    num_refused: int  # of those, answers that are errors
    num_bad: int  # lines without an answer: invalid JSON, or a missing or repeated custom_id


def survey(
    path: Path, salt: str, answers: AnswersFile, report: Callable[[int, str], None]
) -> Survey:
    """Compare the input with the existing answers, and return what is left to do.

    report: called with the number of each invalid line and a message. The check takes about 100
    bytes of memory per line, which are released afterwards.

    Raises `ValueError` if `answers` has an answer to a line that is missing in the input or has
    changed, i.e. if the input was edited or the answers belong to another input.
    """
    earlier, num_refused = answers.earlier()
    todo, num_answered, num_bad = Todo(), 0, 0
    seen: set[int] = set()
    with path.open("rb") as file:
        for number, (offset, content) in enumerate(read_lines(file), 1):
            if not content.strip():
                continue
            try:
                line = parse(number, content, salt)
                key = key_of(line.custom_id)
                if key in seen:
                    raise ValueError(
                        f"custom_id={line.custom_id!r:.200} is not unique; the line is skipped"
                    )
            except ValueError as error:
                report(number, str(error))
                num_bad += 1
                continue
            seen.add(key)
            answer = earlier.pop(key, None)
            if answer is None:
                todo.add(number, offset)
            elif answer == key_of_answer(line.answer_id):
                num_answered += 1
            else:
                raise ValueError(
                    f"{answers.path} answers custom_id={line.custom_id!r}, but not the request in "
                    f"{path}:{number}: the line, the model or the seed has changed; use another "
                    "output file"
                )
    if earlier:
        custom_id = answers.custom_id_of(next(iter(earlier)))
        raise ValueError(
            f"{answers.path} answers custom_id={custom_id!r}, which is not in {path}; use "
            "another output file"
        )
    answers.cut_torn_line()
    return Survey(todo, num_answered, num_refused, num_bad)
