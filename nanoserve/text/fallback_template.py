"""Chat templates for models that have none, such as base models."""

from dataclasses import dataclass

from nanoserve.text.special_tokens import SpecialTokens

_BEGIN, _END = "<|im_start|>", "<|im_end|>"
# The calls of a message, each as JSON in a line.
_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "{{ '\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class FallbackTemplate:
    """A generic template, and what ends an answer, since the model's own EOS may not.

    stop_tokens: special tokens. stop: strings.
    """

    name: str
    text: str
    stop_tokens: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


CHATML = FallbackTemplate(
    "ChatML",
    "{% for message in messages %}"
    f"{{{{ '{_BEGIN}' + message.role + '\\n' + message.content }}}}{_CALLS}{{{{ '{_END}\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{_BEGIN}assistant\\n' }}}}{{% endif %}}",
    stop_tokens=(_END,),
)
PLAIN = FallbackTemplate(
    "plain text",
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{% else %}{{ message.role | capitalize + ': ' + message.content }}"
    f"{_CALLS}{{{{ '\\n\\n' }}}}{{% endif %}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    stop=("\nUser:",),
)


def fallback_for(specials: SpecialTokens) -> FallbackTemplate:
    """Return ChatML if the tokenizer has its special tokens, otherwise plain text."""
    has_chatml = all(specials.id_of(token) is not None for token in (_BEGIN, _END))
    return CHATML if has_chatml else PLAIN
