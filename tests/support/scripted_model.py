"""A model that writes what a test wants, as far as its grammar allows: an engine-wide processor.

    script = Script({"How is it?": '{"a": 1}'})
    llm = AsyncLLM("tiny-qwen3", chat_template=TEMPLATE, logits_processors=[script])

Of the keys that a prompt contains, the one that comes last chooses the text. Where the grammar
forbids the next character of the text, the model goes on as it likes.
"""

from functools import lru_cache
from typing import Any

import torch

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.text.tokenizer import Tokenizer

_WANTED = 1000.0

# It shows tools in the manner of Hermes and their results, and may close a thought.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}
A call: <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{%- for call in message.tool_calls or [] %}
calls {{ call.function.name }}{{ call.function.arguments | tojson }}{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{%- endif %}"""


class Script:
    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self._tokenizer = Tokenizer(bundled_checkpoint("tiny-qwen3"))
        self._end = self._tokenizer.special_tokens.id_of("<|im_end|>")
        size = self._tokenizer.backend.get_vocab_size()
        self._tokens: dict[str, list[tuple[int, str]]] = {}  # by their first characters
        for token_id in range(size):
            token = self._decode((token_id,))
            self._tokens.setdefault(token[:1], []).append((token_id, token))

    def __call__(self, logits: torch.Tensor, states: list[Any]) -> None:
        for row, state in enumerate(states):
            prompt = self._decode(tuple(state.prompt_token_ids))
            places = {key: prompt.rfind(key) for key in self.texts}
            key = max(places, key=lambda key: places[key], default=None)
            if key is None or places[key] < 0:
                continue
            text, written = self.texts[key], self._decode(tuple(state.output_token_ids))
            if text == written:
                logits[row, self._end] += _WANTED
            elif text.startswith(written):
                rest = text[len(written) :]
                for token_id, token in self._tokens.get(rest[:1], ()):
                    if rest.startswith(token):
                        logits[row, token_id] += _WANTED + len(token)

    @lru_cache(maxsize=256)  # noqa: B019 - it lives as long as its engine
    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(token_ids), False)
