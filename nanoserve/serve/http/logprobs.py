"""Log-probabilities in the formats of OpenAI's two endpoints."""

from collections.abc import Iterator
from typing import Any

from nanoserve.outputs import Logprob
from nanoserve.text.token_bytes import TextPositions, TokenBytes, name_of
from nanoserve.text.tokenizer import Tokenizer

Entry = dict[int, Logprob] | None  # for one token; None for the first token of a prompt
_LEAST = -9999.0  # JSON has no infinity


class TokenNames:
    """The names of tokens in the response to a request.

    as_ids: use `token_id:5` instead of the text. part: prefix for a token whose bytes are not valid
    UTF-8; OpenAI's older endpoint uses "bytes:".
    """

    def __init__(self, token_bytes: TokenBytes, as_ids: bool, part: str = "") -> None:
        self.token_bytes, self._as_ids, self._part = token_bytes, as_ids, part

    def of(self, token_id: int, content: bytes = b"") -> str:
        """Return the name of a token; `content` are its bytes in this text, if they differ."""
        if self._as_ids:
            return f"token_id:{token_id}"
        content = content or self.token_bytes.of(token_id)
        name = name_of(content)
        return name if name.encode() == content else f"{self._part}{name}"

    def of_all(self, token_ids: Iterator[int], chosen: tuple[int, str]) -> Iterator[str]:
        """Yield distinct names for the candidates of one position.

        The chosen token keeps its name. Of other tokens with equal text, the first token keeps its
        name and later tokens are named by their ids.
        """
        used = {chosen[1]}
        for token_id in token_ids:
            name = chosen[1] if token_id == chosen[0] else self.of(token_id)
            if token_id != chosen[0] and name in used:
                name = f"token_id:{token_id}"
            used.add(name)
            yield name


def of_completion(
    token_ids: list[int],
    entries: list[Entry],
    names: TokenNames,
    contents: list[bytes],
    offsets: list[int],
) -> dict[str, list[Any]]:
    """Return the log-probabilities in the format of /v1/completions.

    contents: for each token, its bytes in the output text. offsets: for each token, the position in
    characters at which it begins.
    """
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for token_id, entry, content in zip(token_ids, entries, contents, strict=True):
        name = names.of(token_id, content)
        shown["tokens"].append(name)
        shown["token_logprobs"].append(None if entry is None else _finite(entry[token_id]))
        shown["top_logprobs"].append(entry and _by_name(entry, names, (token_id, name)))
    return shown | {"text_offset": offsets}


def of_chat(
    token_ids: list[int],
    entries: list[dict[int, Logprob]],
    num_top: int,
    names: TokenNames,
    positions: TextPositions,
) -> dict[str, list[Any]]:
    """Return the log-probabilities in the format of /v1/chat/completions.

    The concatenated bytes of all tokens are the UTF-8 of the text, so a special token that the text
    omits has no bytes. `positions` is advanced by the tokens.
    """
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        own = positions.content(token_id)
        positions.advance(token_id)
        top = [
            _candidate(names.of(i), other, names.token_bytes.of(i))
            for i, other in _by_rank(entry)
            if other.rank <= num_top
        ]
        chosen = _candidate(names.of(token_id, own), entry[token_id], own)
        content.append(chosen | {"top_logprobs": top})
    return {"content": content}


def of_prompt(entries: list[Entry]) -> list[dict[str, Any] | None]:
    """Return log-probabilities in the format of vLLM's `prompt_logprobs`."""
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": _finite(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for i, one in _by_rank(entry)
        }
        for entry in entries
    ]


def offsets_in_prompt(tokenizer: Tokenizer, text: str, token_ids: list[int]) -> list[int]:
    """Return the offsets of the tokens of a prompt in its text, in characters.

    A token that continues a character has the offset of that character. Tokens that the tokenizer
    has added, such as BOS, have the offset of the next token.
    """
    known = tokenizer.token_bytes
    for added in (" ", "") if known.strips else ("",):  # a space that the tokenizer prepends
        aligned = _aligned(known, added + text, token_ids)
        if aligned is not None:
            return [max(0, begin - len(added)) for begin in aligned]
    for add_special_tokens in (True, False):  # the text was normalized: use the tokenizer's offsets
        encoding = tokenizer.backend.encode(text, add_special_tokens=add_special_tokens)
        if encoding.ids == token_ids:
            begins, last = [], 0
            for begin, end in encoding.offsets:
                last = begin if end else last  # (0, 0) means no position
                begins.append(last)
            return begins
    positions = TextPositions(known, False, 0)
    return [min(positions.advance(token_id), len(text)) for token_id in token_ids]


def _aligned(token_bytes: TokenBytes, text: str, token_ids: list[int]) -> list[int] | None:
    """Return the offsets found by matching bytes; None if the tokens do not match the text."""
    content, at, num_characters, begins = text.encode("utf-8", "surrogatepass"), 0, 0, []
    for token_id in token_ids:
        piece = token_bytes.of(token_id)
        if not content.startswith(piece, at):
            if not token_bytes.is_special(token_id):
                return None
            piece = b""  # added by the tokenizer, so not part of the text
        inside = at < len(content) and content[at] & 0xC0 == 0x80
        begins.append(num_characters - inside)
        num_characters += sum(byte & 0xC0 != 0x80 for byte in piece)
        at += len(piece)
    return begins if at == len(content) else None


def _by_name(
    entry: dict[int, Logprob], names: TokenNames, chosen: tuple[int, str]
) -> dict[str, float]:
    ranked = [*_by_rank(entry)]
    named = names.of_all((token_id for token_id, _ in ranked), chosen)
    return {name: _finite(one) for name, (_, one) in zip(named, ranked, strict=True)}


def _candidate(name: str, entry: Logprob, content: bytes) -> dict[str, Any]:
    return {"token": name, "logprob": _finite(entry), "bytes": list(content)}


def _by_rank(entry: dict[int, Logprob]) -> Iterator[tuple[int, Logprob]]:
    return iter(sorted(entry.items(), key=lambda item: item[1].rank))


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
