"""Distinguishes special tokens of the chat template from message text that looks like them.

To a tokenizer `<|im_end|>` is one control token, wherever it comes from. So a user who types it
could end the user's turn and continue in another role.
"""

import re
import secrets
from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend

# Characters for private use in Unicode, which no tokenizer and no template treats specially.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_NAME = "\U00100000{}\U00100001"  # from another range for private use


class SpecialTokens:
    """The added tokens of `backend` that are marked as special.

    Other added tokens, such as `<think>` of Qwen3, are excluded: they stay in the text of an
    output, and must become the same tokens again when that text is sent back as a message.
    """

    def __init__(self, backend: TokenizerBackend) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._tokens = {token.content: (i, token) for i, token in added.items() if token.special}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        # A tokenizer without special tokens gets a pattern that never matches.
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.first_characters = sorted({content[0] for content in self._tokens})

    def id_of(self, text: str) -> int | None:
        """Return the id of the special token with this text, or None."""
        return self._tokens[text][0] if text in self._tokens else None

    def found_in(self, text: str) -> list[str]:
        """Return all special tokens in `text`, in order."""
        return self._pattern.findall(text)

    def may_be_in(self, text: str) -> bool:
        return any(character in text for character in self.first_characters)

    def make_marks(self, texts: list[str]) -> "Marks":
        """Return marks: characters that occur in none of these strings."""
        unused = (
            mark for mark in map(chr, _PRIVATE_USE) if not any(mark in text for text in texts)
        )
        return Marks(dict(zip(self.first_characters, unused, strict=False)), self._pattern)

    def encode(self, text: str, marks: "Marks") -> list[int]:
        """Return the token ids of a text in which `marks` mask the special tokens that were typed.

        Masked special tokens are encoded as ordinary text, and so is the text around them.
        """
        backend, stand_ins, ids_of = self._reader
        text, num_special = self._pattern.subn(lambda found: stand_ins[found[0]], text)
        token_ids = backend.encode(marks.remove(text), add_special_tokens=False).ids
        text_ids = {i for content, (i, _) in self._tokens.items() if content != self._unknown}
        if num_special != sum(map(ids_of.__contains__, token_ids)) or text_ids & {*token_ids}:
            raise ValueError(
                "this tokenizer cannot distinguish special tokens from text that looks like them, "
                "and a message has such text; set allow_special_tokens=True to encode it as "
                "special tokens"
            )
        return [ids_of.get(token_id, token_id) for token_id in token_ids]

    @property
    def _unknown(self) -> str | None:
        """Token for unknown characters, which any text may contain."""
        return getattr(self._backend.model, "unk_token", None)

    @cached_property
    def _reader(self) -> tuple[TokenizerBackend, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer that knows special tokens by other names only.

        Also returns these names by token, and the true ids by the ids of the names. Users cannot
        type a name, because it is random. The copy is made when the first message needs it.
        """
        backend = TokenizerBackend.from_str(self._backend.to_str())
        backend.no_truncation()
        backend.no_padding()
        stand_ins, ids_of = {}, {}
        for content, (token_id, token) in self._tokens.items():
            name = stand_ins[content] = _NAME.format(secrets.token_hex(8))
            same = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip")}
            backend.add_tokens(
                [AddedToken(name, normalized=token.normalized, special=False, **same)]
            )
            own_id = backend.token_to_id(name)
            ids_of[own_id] = token_id
        backend.encode_special_tokens = True  # encode the original special tokens as text
        return backend, stand_ins, ids_of


class Marks:
    """Replacements for the first characters of special tokens while a template is rendered.

    A marked text is not a special token, whatever a template does to it: it may be cut, trimmed or
    joined with others. The worst that can happen is that a mark is lost.
    """

    def __init__(self, mark_of: dict[str, str], specials: re.Pattern[str]) -> None:
        self._table = str.maketrans(mark_of)
        self._back = str.maketrans({mark: character for character, mark in mark_of.items()})
        self._specials = specials

    def on_special_tokens(self, text: str) -> str:
        """Mark whole special tokens only, so that the template sees all other text unchanged."""
        return self._specials.sub(lambda found: found[0].translate(self._table), text)

    def everywhere(self, text: str) -> str:
        """Mark every possible first character, so that no parts can form a special token."""
        return text.translate(self._table)

    def remove(self, text: str) -> str:
        return text.translate(self._back)
