"""Numbers of chapter 19: a regular expression, its states, and their masks over twelve tokens.

An expression is a tree of tuples: a set of characters, `("cat", a, b)`, `("alt", a, b)`, `EMPTY`
(the empty text) or `NOTHING` (no text at all). What must still be matched after a character is its
*derivative*, which is an expression. So the states of the automaton are expressions.
"""

from functools import cache

from tables import table

EMPTY, NOTHING = "empty", "nothing"
PATTERN = r'\{"n": [0-9]{1,2}\}'
VOCABULARY = ["{", '"', "n", ":", " ", "}", "0", "7", '{"', '":', " 7", "7}"]
_DIGIT = frozenset("0123456789")


def mask_table() -> str:
    """Each state of the example: what must still be matched, the allowed tokens, and their mask."""
    rows = []
    for number, state in enumerate(_states()):
        allowed = _allowed(state)
        bits = "".join("1" if i in allowed else "0" for i in reversed(range(len(VOCABULARY))))
        tokens = " ".join(map(_shown, allowed)) or "none"
        still = f"`{_text(state)}`" if state != EMPTY else "nothing"
        word = sum(1 << i for i in allowed)
        rows.append((number, still, tokens, f"`{bits}`", word, "yes" if _may_end(state) else ""))
    header = ("state", "still to match", "allowed tokens", "bits 11 to 0", "word")
    return table((*header, "may end"), rows)


def vocabulary() -> str:
    """The tokens with their ids."""
    return ", ".join(f"{i} {_shown(i)}" for i in range(len(VOCABULARY)))


def num_states() -> int:
    return len(_states())


def num_tokenizations(text: str) -> int:
    """Number of ways to write this text with tokens that are all allowed."""

    @cache
    def ways(state: object, rest: str) -> int:
        if not rest:
            return int(_may_end(state))
        fitting = [i for i in _allowed(state) if rest.startswith(VOCABULARY[i])]
        return sum(ways(_walk(state, VOCABULARY[i]), rest[len(VOCABULARY[i]) :]) for i in fitting)

    return ways(_rule(), text)


def run_table(number: str) -> str:
    """Steps of an output with this number, with jump-forward tokens."""
    rows = []
    for step, (forced, chosen) in enumerate(_steps(number), 1):
        drafts = " ".join(map(_shown, forced)) or "none"
        rows.append((step, drafts, "ended" if chosen is None else _shown(chosen)))
    return table(("step", "jump-forward tokens", "sampled after them"), rows)


def num_steps(number: str, jump_forward: bool) -> int:
    """Steps for the whole output, with jump-forward tokens or with one token per step."""
    return len(_steps(number)) if jump_forward else num_tokens(number)


def num_tokens(number: str) -> int:
    return sum(len(forced) + (chosen is not None) for forced, chosen in _steps(number))


def num_forced(number: str) -> int:
    """Tokens of the output without a choice: the jump-forward tokens, and the first one."""
    return 1 + sum(len(forced) for forced, _ in _steps(number))


def is_right(num_tokens: int, each: float) -> float:
    """Probability that all tokens are allowed, if each one is with probability `each`."""
    return each**num_tokens


def tries(num_tokens: int, each: float) -> float:
    """Mean number of requests until an answer is valid as a whole."""
    return 1 / is_right(num_tokens, each)


def mask_bytes(vocab_size: int) -> int:
    """Bytes of one row's mask: 32 tokens per word of four bytes."""
    return 4 * -(-vocab_size // 32)


def logits_bytes(vocab_size: int) -> int:
    """Bytes of one row of logits in float32."""
    return 4 * vocab_size


def table_bytes(num_states: int, vocab_size: int) -> int:
    """Bytes of all masks, if they were computed in advance."""
    return num_states * mask_bytes(vocab_size)


def lookback_states(num_letters: int) -> int:
    """States of the smallest automaton for `(a|b)*a(a|b){num_letters}`."""
    return 2 ** (num_letters + 1)


def rows_with_masks(num_rows: int, legal_mass: float) -> float:
    """Rows of a step for which a mask is filled, if a sample is allowed with this probability."""
    return num_rows * (1 - legal_mass)


def two_answers(first: float, legal_after: tuple[float, float]) -> str:
    """Effect of masks on a model that begins an answer in one of two ways, both of them allowed.

    first: probability that the model begins with "A"; legal_after: the share of its continuations
    that are allowed, after "A" and after "B".
    """
    alone = (first, 1 - first)
    both = [p * legal for p, legal in zip(alone, legal_after, strict=True)]
    rows = [
        (f"begins with {name}", f"{p:.0%}", f"{legal:.0%}", f"{p:.0%}", f"{joint / sum(both):.0%}")
        for name, p, legal, joint in zip("AB", alone, legal_after, both, strict=True)
    ]
    header = ("", "model", "allowed after it", "with masks", "of the model's valid answers")
    return table(header, rows)


def _rule() -> tuple:
    """`PATTERN`, as a tree."""
    number = ("cat", _DIGIT, ("alt", _DIGIT, EMPTY))
    parts = [*map(frozenset, '{"n": '), number, frozenset("}")]
    rule = parts.pop()
    while parts:
        rule = _cat(parts.pop(), rule)
    return rule


def _cat(first: object, second: object) -> object:
    if NOTHING in (first, second):
        return NOTHING
    if first == EMPTY:
        return second
    if second == EMPTY:
        return first
    if (
        isinstance(first, tuple) and first[0] == "cat"
    ):  # always nested to the right, so that equal states are equal tuples
        return ("cat", first[1], _cat(first[2], second))
    return ("cat", first, second)


def _may_end(node: object) -> bool:
    """Whether the empty text matches."""
    if isinstance(node, frozenset) or node in (EMPTY, NOTHING):
        return node == EMPTY
    parts = _may_end(node[1]), _may_end(node[2])
    return all(parts) if node[0] == "cat" else any(parts)


def _derivative(node: object, character: str) -> object:
    """What must still be matched after this character."""
    if isinstance(node, frozenset):
        return EMPTY if character in node else NOTHING
    if node in (EMPTY, NOTHING):
        return NOTHING
    kind, one, two = node
    if kind == "cat":
        rest = _cat(_derivative(one, character), two)
        return _alt(rest, _derivative(two, character)) if _may_end(one) else rest
    return _alt(_derivative(one, character), _derivative(two, character))


def _alt(one: object, two: object) -> object:
    if NOTHING in (one, two):
        return two if one == NOTHING else one
    return one if one == two else ("alt", one, two)


def _walk(state: object, text: str) -> object:
    for character in text:
        state = _derivative(state, character)
    return state


def _allowed(state: object) -> list[int]:
    """The allowed tokens: those whose characters can all be read from this state."""
    return [i for i, text in enumerate(VOCABULARY) if _walk(state, text) != NOTHING]


@cache
def _states() -> list[object]:
    """In the order in which they are first reached, character by character."""
    states = [_rule()]
    for state in states:
        for character in '{"n: 0123456789}':
            after = _derivative(state, character)
            if after != NOTHING and after not in states:
                states.append(after)
    return states


def _forced_text(state: object) -> str:
    """The characters without a choice, however they are tokenised."""
    text = ""
    while not _may_end(state):
        characters = [c for c in '{"n: 0123456789}' if _derivative(state, c) != NOTHING]
        if len(characters) != 1:
            break
        text += characters[0]
        state = _derivative(state, characters[0])
    return text


def _forced(state: object) -> list[int]:
    """Jump-forward tokens: text without a choice as it is tokenised, the longest token first.

    The last token is left out if a longer one that begins with it is allowed, too.
    """
    text, run = _forced_text(state), []
    while text:
        token = max((t for t in VOCABULARY if text.startswith(t)), key=len)
        longer = [t for t in VOCABULARY if t.startswith(text) and len(t) > len(text)]
        if any(_walk(state, t) != NOTHING for t in longer):
            break
        run.append(VOCABULARY.index(token))
        state, text = _walk(state, token), text[len(token) :]
    return run


def _steps(number: str) -> list[tuple[list[int], int | None]]:
    """For each step, the jump-forward tokens and the token sampled after them.

    The first step computes the prompt, and has no draft tokens.
    """
    wanted, state, steps = f'{{"n": {number}}}', _rule(), []
    while not _may_end(state):
        run = _forced(state)
        drafts = run if steps else []
        for i in drafts:
            state, wanted = _walk(state, VOCABULARY[i]), wanted[len(VOCABULARY[i]) :]
        fitting = [i for i in _allowed(state) if wanted.startswith(VOCABULARY[i])]
        chosen = max(fitting, key=lambda i: len(VOCABULARY[i])) if fitting else None
        if chosen is not None:
            state, wanted = _walk(state, VOCABULARY[chosen]), wanted[len(VOCABULARY[chosen]) :]
        steps.append((drafts, chosen))
    return steps


def _text(node: object) -> str:
    """An expression in the usual notation."""
    if isinstance(node, frozenset):
        if node == _DIGIT:
            return "[0-9]"
        (character,) = node
        return {"{": r"\{", "}": r"\}", " ": "␣"}.get(character, character)
    kind, one, two = node
    if kind == "cat":
        return _text(one) + _text(two)
    return f"{_text(one)}?" if two == EMPTY else f"({_text(one)}|{_text(two)})"


def _shown(token_id: int) -> str:
    return f"`{VOCABULARY[token_id].replace(' ', '␣')}`"
