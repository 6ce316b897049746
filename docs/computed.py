"""Computed values in running text: the text has the value, a comment below has the expression.

An author writes `{{ worked.serving.users(8) }}` within a sentence. `python docs/record.py` replaces
it by its value and notes at the end of the section where the value stands and how it is computed:

    <!-- computed
    serves [431] = {{ worked.serving.users(8) }}
    -->

The words before the brackets are those before the value in the text, as many as make the place
unique since the previous such comment. So a file reads as a page does, and a value that has changed
is found and replaced at its place. Lines can be written and edited by hand.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

COMMENT = re.compile(r"\n*^<!-- computed\n(?P<lines>.*?)^-->$\n*", re.M | re.S)
# Within a value, brackets are balanced: it may be a list, or a list of lists.
_LIST = r"\[(?:[^][]|\[[^][]*\])*\]"
_LINE = re.compile(
    rf"(?P<before>.*)\[(?P<value>(?:[^][]|{_LIST})*)\] = \{{\{{(?P<expression>.*)\}}\}}"
)
_HEADING = re.compile(r"^#+ ", re.M)
_FENCE = re.compile(r"^[> ]*(`{3,})[^\n]*\n.*?^[> ]*\1 *$", re.M | re.S)
_FEWEST_WORDS, _MOST_WORDS = 2, 12
# Value and number of a place that is not noted yet: characters that no page has.
_NEW = re.compile("\x00(\\d+)\x01(.*?)\x02", re.S)


@dataclass(frozen=True)
class Computed:
    """A value in running text.

    before: the words before the value, which make its place unique; may be empty.
    expression: Jinja's, without the braces.
    """

    before: str
    value: str
    expression: str

    def __str__(self) -> str:
        before = f"{self.before} " if self.before else ""
        return f"{before}[{self.value}] = {{{{ {self.expression} }}}}"

    def place(self, text: str) -> re.Match[str]:
        """Return the match of `before` and value in `text`; its group 1 is the value.

        Raises `ValueError` unless there is exactly one.
        """
        found = list(_pattern(self.before, self.value).finditer(text))
        if len(found) == 1:
            return found[0]
        said = f"{self.before} {self.value}".strip()
        how = "more words before the value" if found else "the words that the text has now"
        raise ValueError(f"{said!r} is {len(found)} times in the text above: write {how} in {self}")


def new_place(number: int, value: str) -> str:
    """Return a value as it stands in a text until `note_new` has noted its place."""
    return f"\x00{number}\x01{value}\x02"


def computed_values(comment: str) -> list[Computed]:
    """Return the values of the lines of a comment.

    Raises `ValueError` for a line of another form.
    """
    found = []
    for line in filter(None, map(str.strip, comment.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"write `words [value] = {{{{ expression }}}}` instead of {line!r}")
        found.append(Computed(match["before"].strip(), match["value"], match["expression"].strip()))
    return found


def update(text: str, value: Callable[[str], str]) -> str:
    """Return the text with the values that its comments name computed again."""
    done, rest = "", text
    while match := COMMENT.search(rest):
        above, lines = rest[: match.start()], []
        for each in computed_values(match["lines"]):
            start, end = each.place(above).span(1)
            now = Computed(each.before, value(each.expression), each.expression)
            above = above[:start] + now.value + above[end:]
            lines.append(str(now))
        done += above + _comment(lines)
        rest = rest[match.end() :]
    return done + rest


def note_new(text: str, expressions: list[str]) -> str:
    """Return the text with its new places noted at the ends of their sections."""
    return "".join(_noted(section, expressions) for section in _sections(text))


def _noted(section: str, expressions: list[str]) -> str:
    places = list(_NEW.finditer(section))
    if not places:
        return section
    *_, last = [None, *COMMENT.finditer(section)]
    known = ""
    if last is not None and last.start() > places[-1].start():
        known, section = last["lines"], section[: last.start()] + "\n\n" + section[last.end() :]
    lines = [*map(str, computed_values(known))]
    shown = _NEW.sub(lambda match: match[2], section)
    since = 0
    for match in COMMENT.finditer(shown):
        since = match.end()
    for match in _NEW.finditer(section):
        before = _NEW.sub(lambda earlier: earlier[2], section[: match.start()])
        lines.append(str(_unique(before, match[2], expressions[int(match[1])], shown[since:])))
    return shown.rstrip("\n") + _comment(lines)


def _unique(before: str, value: str, expression: str, text: str) -> Computed:
    words = re.sub(r"\n>", "\n", before).rsplit("[", 1)[-1].split()
    for count in range(min(_FEWEST_WORDS, len(words)), min(len(words), _MOST_WORDS) + 1):
        found = Computed(" ".join(words[len(words) - count :]), value, " ".join(expression.split()))
        if len(_pattern(found.before, value).findall(text)) == 1:
            return found
    said = " ".join([*words[-_MOST_WORDS:], value])
    raise ValueError(f"{said!r} stands more than once in this section: write other words")


def _pattern(before: str, value: str) -> re.Pattern[str]:
    gap = r"(?:\s+(?:> ?)*|)"
    words = "".join(re.escape(word) + gap for word in before.split())
    said = r"\s+(?:> ?)*".join(map(re.escape, value.split()))
    after = r"(?!\w|[.,]\d)" if re.search(r"\w$", value) else ""
    ahead = r"(?<![\w])" if re.match(r"\w", before or value) else ""
    return re.compile(f"{ahead}{words}({said}){after}")


def _comment(lines: list[str]) -> str:
    return "\n\n<!-- computed\n" + "".join(f"{line}\n" for line in lines) + "-->\n\n"


def _sections(text: str) -> Iterator[str]:
    """Yield the pieces of a text that begin with a heading; headings in code are none."""
    fences = [match.span() for match in _FENCE.finditer(text)]
    starts = [
        match.start()
        for match in _HEADING.finditer(text)
        if not any(start <= match.start() < end for start, end in fences)
    ]
    edges = [0, *(start for start in starts if start), len(text)]
    for start, end in pairwise(edges):
        yield text[start:end]
