"""Make prompts of words or random token ids for a server with an unknown tokenizer."""

from typing import NamedTuple

# Common words, each a single token with the space before it in most vocabularies of tens of
# thousands of tokens.
_TEXT = """
apple autumn bank bird board boat book bottle box bread bridge car chair cloud coat coffee corner
day desk dog door farm field fire fish floor flower forest game garden glass gold grass green hand
hill horse house ice island key kitchen lake lamp letter light market milk moon morning mountain
night ocean orange paper park pencil phone picture plane plate pocket queen rain ring river road
roof room rose salt sand school sea shadow sheep ship shirt silver sister sky snow song spring
star stone street summer sun table tea tower town train tree valley village wall water wheel wind
window winter wood yellow
"""
WORDS = tuple(_TEXT.split())


class WordLength(NamedTuple):
    """The tokens per word, and the tokens that a server adds (chat template, BOS)."""

    per_word: float = 1.0
    around: float = 0.0


def word_length(short: tuple[int, int | None], long: tuple[int, int | None]) -> WordLength:
    """Return the length of words from two prompts: (words, tokens by the server or None)."""
    (few, fewer), (many, more) = short, long
    if fewer is None or more is None or more <= fewer:
        return WordLength()
    per_word = max(1.0, (more - fewer) / (many - few))
    return WordLength(per_word, max(0.0, fewer - few * per_word))


def text(token_ids: list[int], length: WordLength, shift: int) -> str:
    """Return a prompt of about as many tokens as `token_ids`, and at least one word.

    The word at a position does not depend on later ids, so prompts with a common prefix of ids
    begin with the same words. Another `shift` gives another prompt of the same length.
    """
    chosen, spent = [], length.around
    for position, token_id in enumerate(token_ids, start=1):
        if spent + length.per_word <= position + 0.5:
            chosen.append(WORDS[(token_id + shift) % len(WORDS)])
            spent += length.per_word
    return " ".join(chosen) or WORDS[(token_ids[0] + shift) % len(WORDS)]


def shifted(token_ids: list[int], vocab_size: int, shift: int) -> list[int]:
    return [(token_id + shift) % vocab_size for token_id in token_ids]
