"""What a prompt may be, and a conversation."""

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from pathlib import Path


class _Salted(TypedDict, total=False):
    cache_salt: str  # shares cached prefixes only with prompts of the same


class TextPrompt(_Salted):
    """A text to complete. The tokenizer adds what the model expects around one, such as BOS."""

    prompt: str


class _Told(_Salted, total=False):
    prompt: str  # is only carried along, to the output


class TokensPrompt(_Told):
    """Token ids to continue, as they are."""

    prompt_token_ids: AbstractSequence[int]


PromptType = str | AbstractSequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Conversation = list[dict[str, Any]] | list[dict[str, str]] | AbstractSequence[Message]
Conversations = AbstractSequence[Conversation]


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt; see `LLM.chat`."""

    chat_template: "str | Path | None"
    chat_template_content_format: str
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    allow_special_tokens: bool
