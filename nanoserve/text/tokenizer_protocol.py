"""Interface of a tokenizer as the engine uses it; the implementation imports torch."""

from typing import Protocol

from tokenizers import Tokenizer as TokenizerBackend


class Tokenizer(Protocol):
    """Tokenizer of a checkpoint; see `nanoserve.text.tokenizer.Tokenizer`."""

    backend: TokenizerBackend
    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...
