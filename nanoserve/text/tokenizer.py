"""Converts text to token ids and back with the checkpoint's Hugging Face tokenizer.

Token ids follow its tokenizer.json. The transformers classes named in tokenizer_config.json
construct their own pipeline from text to tokens; some, such as LlamaTokenizer and GPT2Tokenizer,
use only the vocabulary and the merges of the file. So only the roles of tokens, such as EOS, come
from these classes.
"""

import copy
import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoserve.checkpoint.config_json import read_json
from nanoserve.checkpoint.gguf.tokenizer import read_tokenizer
from nanoserve.text.special_tokens import SpecialTokens
from nanoserve.text.token_bytes import TokenBytes
from nanoserve.utils.checks import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoserve.checkpoint.gguf.container import GGUFFile
    from nanoserve.text.special_tokens import Marks, SpecialTokens
    from nanoserve.text.token_bytes import TokenBytes

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
_FROM_OUTSIDE = {"tools", "documents"}  # template arguments with untrusted text


class Tokenizer:
    """A tokenizer with the methods that the engine and `LLM.chat` need.

    source: a folder, or a GGUF file or its path. chat_template: a template, as a string, that
    replaces the checkpoint's. Raises `ValueError` if the folder has no tokenizer (transformers
    would create an empty one), and if one of its files is damaged. Code in a checkpoint runs only
    with `trust_remote_code`.
    """

    def __init__(
        self,
        source: "str | Path | GGUFFile",
        trust_remote_code: bool = False,
        chat_template: str | Path | None = None,
    ) -> None:
        if isinstance(source, str):
            source = Path(source)
        if isinstance(source, Path) and not source.is_file():
            self._hf = _read_folder(source, trust_remote_code)
        else:
            self._hf = read_tokenizer(source)
        if chat_template is not None:
            self._hf.chat_template = str(chat_template)
        elif self._hf.chat_template is None and isinstance(source, Path):
            self._hf.chat_template = _of_processor(source)

    @property
    def backend(self) -> TokenizerBackend:
        return self._hf.backend_tokenizer

    @cached_property
    def hugging_face(self) -> "PreTrainedTokenizerBase":
        """The transformers tokenizer, as a copy: its calls may change settings like truncation."""
        return copy.deepcopy(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        return self._hf.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return self._hf.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The chat template; if there are several, all of them concatenated."""
        template = self._hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids, by default with the special tokens that the model expects.

        Raises `ValueError` if the text cannot be encoded.
        """
        try:
            return self._hf.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # for example, a lone surrogate is not valid text
            raise ValueError(f"the text {text[:50]!r} cannot be tokenized: {error}") from error

    def encode_pair(self, first: str, second: str, most: int | None = None) -> list[int]:
        """Return the token ids of two texts, joined as the tokenizer joins a pair.

        most: cut off the ends of the texts, of the longer one first, to keep this number of tokens.
        Raises `ValueError` if a text cannot be encoded, or if no token of it would be left.
        """
        try:
            whole = self._hf.encode(first, second)
            if most is None or len(whole) <= most:
                return whole
            encode = partial(self.backend.encode, add_special_tokens=False)
            parts = encode(first), encode(second)
        except TypeError as error:
            raise ValueError(f"the pair {first[:50]!r} cannot be tokenized: {error}") from error
        room = most - self.backend.num_special_tokens_to_add(is_pair=True)
        if room < 2:
            raise ValueError(f"{most} tokens leave no room for the texts of the pair")
        shorter = min(room // 2, *map(len, parts))
        is_second_longer = len(parts[1]) >= len(parts[0])
        for part, is_longer in zip(parts, (not is_second_longer, is_second_longer), strict=True):
            part.truncate(room - shorter if is_longer else shorter)
        return self.backend.post_process(*parts).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def token_bytes(self) -> "TokenBytes":
        return TokenBytes(self.backend)

    @cached_property
    def special_tokens(self) -> "SpecialTokens":
        return SpecialTokens(self.backend)

    def encode_marked(self, text: str, marks: "Marks") -> list[int]:
        """Return the token ids of a rendered conversation; marked special tokens stay text."""
        typed = marks.remove(text)
        if typed == text:
            return self.encode(text, add_special_tokens=False)
        try:
            return self.special_tokens.encode(text, marks)
        except TypeError as error:
            raise ValueError(f"the text {typed[:50]!r} cannot be tokenized: {error}") from error

    def apply_chat_template(
        self,
        messages: AbstractSequence[Message],
        add_generation_prompt: bool = True,
        mark_text: Callable[[str], str] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation as the text that the model was trained on, with special tokens.

        `mark_text` is applied to all strings that come from users, before the template sees them.
        Raises `ValueError` if there is no template, or if the template raises.
        """
        if not self.has_chat_template and kwargs.get("chat_template") is None:
            raise ValueError(
                "this model has no chat template, so messages cannot be rendered as a prompt. Pass "
                "chat_template=FILE (server: --chat-template FILE), or pass the prompt as a string "
                "(generate(); server: /v1/completions)"
            )
        try:
            seen = list(messages)
            if mark_text is not None:
                seen = _with_marks(seen, mark_text)
                kwargs |= {k: _with_marks(kwargs[k], mark_text) for k in _FROM_OUTSIDE & {*kwargs}}
            hf: Any = self._hf  # its annotations allow fewer kinds of messages
            return hf.apply_chat_template(
                seen, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(
                f"the chat template cannot render {shown(messages)}: {error}"
            ) from error


def _read_folder(folder: Path, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a folder. Raises `ValueError` as `Tokenizer` does."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json: pass tokenizer=FOLDER, or "
            f"skip_tokenizer_init=True to use token ids only"
        )
    _reject_pipes(folder)
    try:
        found = _as_its_file_says(_load(folder, trust_remote_code), folder)
    except Exception as error:  # whatever a damaged file makes transformers raise
        reason = _damage(folder) or f"{error!r:.600}"
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error
    if not isinstance(getattr(found, "backend_tokenizer", None), TokenizerBackend):
        raise ValueError(
            f"the tokenizer in {folder} is a {type(found).__name__}; only fast tokenizers "
            f"(of the tokenizers library) are supported"
        )
    return found


def _of_processor(folder: Path) -> str | None:
    """Return the chat template of a multimodal model's processor, which has a file of its own."""
    file = folder / "chat_template.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    return template if isinstance(template, str) else None


def _load(folder: Path, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """Return the transformers tokenizer of a folder, of the class that it names if possible."""
    try:
        # Without an explicit value, transformers would prompt at the terminal.
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        config = folder / "tokenizer_config.json"
        if config.is_file() and "auto_map" in read_json(config):
            raise
        try:  # the named class does not fit tokenizer.json, which takes precedence
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        except Exception:
            raise error from None


def _as_its_file_says(hf: "PreTrainedTokenizerBase", folder: Path) -> "PreTrainedTokenizerBase":
    """Return a tokenizer that follows tokenizer.json and keeps the special-token roles of `hf`.

    Special tokens added before and after the input also come from tokenizer.json; as in
    transformers 5, `add_bos_token` and `add_eos_token` in tokenizer_config.json have no effect.
    Custom tokenizer classes (remote code) are returned unchanged.
    """
    if not type(hf).__module__.startswith("transformers."):
        return hf
    found: Any = hf
    if type(hf) is not PreTrainedTokenizerFast:
        found = PreTrainedTokenizerFast.from_pretrained(str(folder))
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = getattr(hf, role)  # may be a default of the class that no file names
            if getattr(found, role) is None and token in found.get_vocab():
                found.add_special_tokens({role: token})
    file = read_json(folder / "tokenizer.json")
    backend: TokenizerBackend = found.backend_tokenizer
    added = file.get("added_tokens") or []
    file |= {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    steps = TokenizerBackend.from_str(json.dumps(file))  # fast, because the vocabulary is empty
    backend.normalizer, backend.pre_tokenizer = steps.normalizer, steps.pre_tokenizer
    backend.decoder, backend.post_processor = steps.decoder, steps.post_processor
    # A token that has a role is special, whatever the file says; the rest is as in the file.
    specials = {token.content for token in found.added_tokens_decoder.values() if token.special}
    tokens = [{k: v for k, v in token.items() if k != "id"} for token in added]
    backend.add_tokens(
        [AddedToken(**token | {"special": token["content"] in specials}) for token in tokens]
    )
    return found


def _with_marks(value: Any, mark_text: Callable[[str], str]) -> Any:
    """Return a copy of nested lists and dictionaries with `mark_text` applied to all strings.

    This includes the keys of dictionaries.
    """
    if isinstance(value, str):
        return mark_text(value)
    if isinstance(value, Mapping):
        return {_with_marks(k, mark_text): _with_marks(v, mark_text) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_marks(inner, mark_text) for inner in value]
    return value


def _reject_pipes(folder: Path) -> None:
    """Raise `ValueError` for pipes and broken links.

    transformers would wait for a pipe for ever, and ignores a broken link.
    """
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and not (file.is_file() or file.is_dir()):
            raise ValueError(f"{file} is not a regular file")


def _damage(folder: Path) -> str | None:
    """Return which file prevents a tokenizer from being loaded, if that is easy to see."""
    try:
        for file in sorted(folder.glob("*token*.json")):
            read_json(file)
    except ValueError as error:
        return str(error)
    try:
        TokenizerBackend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain exceptions
        return f"tokenizer.json: {error!s:.300}"
    return None
