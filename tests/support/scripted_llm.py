"""A served engine whose model says what a test wants: a prompt names the script of its answer."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanoserve.serve.async_llm import AsyncLLM

# A template with tools and reasoning, in the manner of Qwen3's.
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
_NAMED = re.compile(r"script: ([\w-]+)")


def forced(token_ids: list[int], end: int) -> Any:
    """Return a logits processor that leaves one token at a time, and EOS behind them."""

    def process(output: list[int], logits: Any) -> Any:
        wanted = token_ids[len(output)] if len(output) < len(token_ids) else end
        logits[:wanted] = logits[wanted + 1 :] = float("-inf")
        return logits

    return process


class Scripts:
    """The texts that the model says to prompts with `script: NAME` (the last one counts)."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.texts: dict[str, str] = {}
        self.prompts: list[str] = []
        self._tokenizer = llm.engine.tokenizer
        self._process = llm.engine.input_processor.process

    def process(self, request_id: str, prompt: Any, params: Any, priority: int = 0) -> Any:
        text = prompt["prompt"] if isinstance(prompt, dict) else str(prompt)
        self.prompts.append(text)
        names = _NAMED.findall(text)
        if names:
            token_ids = self._tokenizer.encode(self.texts[names[-1]], False)
            params.logits_processors = [forced(token_ids, self._tokenizer.eos_token_id)]
        return self._process(request_id, prompt, params, priority)


@contextmanager
def scripted_llm(**options: Any) -> Iterator[tuple[AsyncLLM, Scripts]]:
    """The bundled model with the template above, and its scripts."""
    sizes = {"dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 1000, "max_model_len": 1024}
    llm = AsyncLLM("tiny-qwen3", **{"chat_template": TEMPLATE, **sizes, **options})
    scripts = Scripts(llm)
    llm.engine.input_processor.process = scripts.process
    try:
        yield llm, scripts
    finally:
        llm.shutdown()
