"""Look through the input before anything is computed: what is left to do, and what is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nanoserve.serve.batch.output_file import AnswersFile
from nanoserve.serve.batch.requests import Todo, key_of, key_of_answer, parse, read_lines


class Survey(NamedTuple):
    todo: Todo
    num_answered: int  # by runs before this one
    num_refused: int  # of those
    num_bad: int  # lines that get no answer: no JSON, no custom_id, or one that came before


def survey(
    path: Path, salt: str, answers: AnswersFile, report: Callable[[int, str], None]
) -> Survey:
    """`report(number, what)` is told of each line that is bad. The memory that this takes for each
    line, some 100 bytes, is free again afterwards.

    Raises `ValueError` if `answers` has one to a line that is not in the input, or is another one
    there: the input has changed, or was made for another file.
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
                    raise ValueError(f"custom_id={line.custom_id!r:.200} came before: left out")
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
                    f"{answers.path} answers custom_id={line.custom_id!r}, but not as "
                    f"{path}:{number} asks for it: another line had that name, or the model or "
                    "seed was another; name another file"
                )
    if earlier:
        custom_id = answers.custom_id_of(next(iter(earlier)))
        raise ValueError(
            f"{answers.path} answers custom_id={custom_id!r}, which is not in {path}: it belongs "
            "to another input; name another file"
        )
    answers.cut_torn_line()
    return Survey(todo, num_answered, num_refused, num_bad)
