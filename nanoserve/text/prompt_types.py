"""Types of prompts and conversations."""

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from pathlib import Path


class _Salted(TypedDict, total=False):
    cache_salt: str  # cached prefixes are shared only with prompts that have the same salt


class TextPrompt(_Salted):
    """A string to continue. The tokenizer adds the special tokens around it, such as BOS."""

    prompt: str


class _WithText(_Salted, total=False):
    prompt: str  # only copied to the output


class TokensPrompt(_WithText):
    """Token ids to continue, which are used unchanged."""

    prompt_token_ids: AbstractSequence[int]


class EmbedsPrompt(_WithText):
    """Embeddings to continue, a tensor [num_tokens, hidden_size]; see `enable_prompt_embeds`."""

    prompt_embeds: Any


class MixedPrompt(TokensPrompt):
    """Token ids with embeddings between them, as (position, tensor [num_rows, hidden_size])."""

    prompt_embeds_pieces: AbstractSequence[tuple[int, Any]]


PromptType = (
    str
    | AbstractSequence[int]
    | TextPrompt
    | TokensPrompt
    | EmbedsPrompt
    | MixedPrompt
    | Mapping[str, Any]
)

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Conversation = list[dict[str, Any]] | list[dict[str, str]] | AbstractSequence[Message]
Conversations = AbstractSequence[Conversation]


class ChatOptions(TypedDict, total=False):
    """Options for rendering a conversation as a prompt; see `LLM.chat`."""

    chat_template: "str | Path | None"
    chat_template_content_format: str
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    allow_special_tokens: bool
