"""Special tokens that a chat template wrote, told apart from text that only looks like them.

To a tokenizer `<|im_end|>` is one control token, whoever wrote it. So who can type it can end his
turn and go on as somebody else.
"""

import re
import secrets
from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend

# Unicode leaves these to private use: no font, no tokenizer and no template knows them.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_NAME = "\U00100000{}\U00100001"  # in another such range


class SpecialTokens:
    """The added tokens of `backend` that its makers call special.

    Others, as `<think>` of Qwen3, are not meant: they stay in the text of an answer, and must
    become the same tokens again when that answer comes back as a message.
    """

    def __init__(self, backend: TokenizerBackend) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._tokens = {token.content: (i, token) for i, token in added.items() if token.special}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        # The empty pattern that is never found stands for a tokenizer without any.
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.first_characters = sorted({content[0] for content in self._tokens})

    def id_of(self, text: str) -> int | None:
        """The token that is written so, if there is one."""
        return self._tokens[text][0] if text in self._tokens else None

    def found_in(self, text: str) -> list[str]:
        """All that stand in `text`, in their order."""
        return self._pattern.findall(text)

    def may_be_in(self, text: str) -> bool:
        return any(character in text for character in self.first_characters)

    def make_marks(self, texts: list[str]) -> "Marks":
        """Characters that are in none of these texts."""
        unused = (
            mark for mark in map(chr, _PRIVATE_USE) if not any(mark in text for text in texts)
        )
        return Marks(dict(zip(self.first_characters, unused, strict=False)), self._pattern)

    def encode(self, text: str, marks: "Marks") -> list[int]:
        """Token ids of a text in which those special tokens that are to be text carry `marks`.

        These are ordinary words, and the text around them is cut into tokens accordingly.
        """
        backend, stand_ins, ids_of = self._reader
        text, num_special = self._pattern.subn(lambda found: stand_ins[found[0]], text)
        token_ids = backend.encode(marks.remove(text), add_special_tokens=False).ids
        text_ids = {i for content, (i, _) in self._tokens.items() if content != self._unknown}
        if num_special != sum(map(ids_of.__contains__, token_ids)) or text_ids & {*token_ids}:
            raise ValueError(
                "this tokenizer cannot tell special tokens from text that looks like them, and a "
                "message has some; allow_special_tokens=True takes them for special tokens"
            )
        return [ids_of.get(token_id, token_id) for token_id in token_ids]

    @property
    def _unknown(self) -> str | None:
        """What stands for unknown characters may come of any text."""
        return getattr(self._backend.model, "unk_token", None)

    @cached_property
    def _reader(self) -> tuple[TokenizerBackend, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer that knows special tokens only by other names; these names; and
        the ids that it gives them, with the true ones.

        Nobody can type a name, because it is random. Made when the first message needs it.
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
            ids_of[backend.token_to_id(name)] = token_id
        backend.encode_special_tokens = True  # as text
        return backend, stand_ins, ids_of


class Marks:
    """Characters that stand for the first ones of special tokens while a template is at work.

    A marked text is no special token, whatever a template does to it: it may be cut, trimmed or
    joined with others. All that can happen is that a mark gets lost.
    """

    def __init__(self, mark_of: dict[str, str], specials: re.Pattern[str]) -> None:
        self._table = str.maketrans(mark_of)
        self._back = str.maketrans({mark: character for character, mark in mark_of.items()})
        self._specials = specials

    def on_special_tokens(self, text: str) -> str:
        """Only where a whole special token stands, so that a template sees all else as it is."""
        return self._specials.sub(lambda found: found[0].translate(self._table), text)

    def everywhere(self, text: str) -> str:
        """So that no special token can begin in this text, and none be put together from parts."""
        return text.translate(self._table)

    def remove(self, text: str) -> str:
        return text.translate(self._back)
