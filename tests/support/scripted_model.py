"""A model that writes what a test wants, as far as its grammar allows: an engine-wide processor.

    with scripted_llm() as (llm, script):
        script.texts["greeting"] = "Hello."  # the answer to a prompt with `script: greeting`

Of the keys that a prompt contains, the one that comes last chooses the text. Where the grammar
forbids the next character of the text, the model goes on as it likes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.text.tokenizer import Tokenizer

_WANTED = 1000.0

# It names tools in the manner of Hermes, shows thoughts, and may close one.
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}{{- tool.function.name + ' ' }}{%- endfor %}"
    "{{- '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}"
    "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


class Script:
    """Texts by keys; before the keys the prompts have `prefix`.

    prompts: the texts of all prompts of a `scripted_llm`.
    """

    def __init__(self, texts: dict[str, str], prefix: str = "") -> None:
        self.texts, self.prefix = texts, prefix
        self.prompts: list[str] = []
        self._tokenizer = Tokenizer(bundled_checkpoint("tiny-qwen3"))
        self._end = self._tokenizer.special_tokens.id_of("<|im_end|>")
        size = self._tokenizer.backend.get_vocab_size()
        self._tokens: dict[str, list[tuple[int, str]]] = {}  # by their first characters
        for token_id in range(size):
            token = self._decode((token_id,))
            self._tokens.setdefault(token[:1], []).append((token_id, token))

    def __call__(self, logits: torch.Tensor, states: list[Any]) -> None:
        for row, state in enumerate(states):
            text = self._text_for(tuple(state.prompt_token_ids), tuple(self.texts))
            if text is None:
                continue
            written = self._decode(tuple(state.output_token_ids))
            if text == written:
                logits[row, self._end] += _WANTED
            elif text.startswith(written):
                rest = text[len(written) :]
                for token_id, token in self._tokens.get(rest[:1], ()):
                    if rest.startswith(token):
                        logits[row, token_id] += _WANTED + len(token)

    @lru_cache(maxsize=256)  # noqa: B019 - it lives as long as its engine
    def _text_for(self, prompt_token_ids: tuple[int, ...], keys: tuple[str, ...]) -> str | None:
        """Where two keys begin at one place, the longer one counts."""
        prompt = self._decode(prompt_token_ids)
        places = [(prompt.rfind(self.prefix + key), len(key), key) for key in keys]
        place, _, key = max(places, default=(-1, 0, ""))
        return None if place < 0 else self.texts[key]

    @lru_cache(maxsize=256)  # noqa: B019
    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(token_ids), False)


@contextmanager
def scripted_llm(**options: Any) -> Iterator[tuple[AsyncLLM, Script]]:
    """The bundled model with the template above; a prompt names its answer by `script: NAME`."""
    script = Script({}, "script: ")
    sizes = {"dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 1000, "max_model_len": 1024}
    options = {"chat_template": TEMPLATE, "logits_processors": [script], **sizes, **options}
    llm = AsyncLLM("tiny-qwen3", **options)
    process = llm.engine.input_processor.process

    def noted(request_id: str, prompt: Any, params: Any, priority: int = 0) -> Any:
        text = prompt["prompt"] if isinstance(prompt, dict) else str(prompt)
        script.prompts.append(text)
        return process(request_id, prompt, params, priority)

    llm.engine.input_processor.process = noted
    try:
        yield llm, script
    finally:
        llm.shutdown()
