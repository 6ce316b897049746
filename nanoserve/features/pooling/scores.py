"""Scores of pairs of texts, such as a query and a document.

model                     a pair becomes
embeddings                two prompts; the score is the cosine of their embeddings
one class                 one prompt of both texts, by the tokenizer or a chat template
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.request import Request
from nanoserve.features.pooling.requests import check_pools, pooling_request, with_task
from nanoserve.features.pooling.results import pooled_of
from nanoserve.lora_request import LoRARequest
from nanoserve.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput
from nanoserve.pooling_params import PoolingParams
from nanoserve.text.chat import prompts_of
from nanoserve.utils.checks import require, shown

# The prompt with which Qwen3-Reranker was trained. A system message replaces the instruction. Jinja
# drops one line break at the end.
QWEN3_RERANKER = """\
{%- macro of(role) -%}
{{ messages | selectattr("role", "eq", role) | map(attribute="content") | first }}
{%- endmacro -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ of("system") or \
"Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ of("query") }}
<Document>: {{ of("document") }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""


class Scorer:
    """Turns pairs of texts into requests, and their outputs into scores.

    chat_template: of a pair, as a file or a string; None is that of the engine, if one was given.
    instruction: a system message for the template. Raises `ValueError` for an engine without scores
    and for arguments that do not fit its model.
    """

    def __init__(
        self,
        engine: Any,
        params: PoolingParams | None = None,
        chat_template: Any = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> None:
        check_pools(engine)
        self._engine, self._pooling = engine, engine.model_config.pooling
        self._is_classifier = self._pooling.is_classifier
        if chat_template is None:
            chat_template = engine.config.chat_template
        if chat_template is None and self._pooling.is_qwen3_reranker:
            chat_template = QWEN3_RERANKER
        labels = len(self._pooling.labels)
        require(
            labels <= 1,
            f"{self._pooling.architecture} has {labels} classes, and a score is that of a single "
            "one: use classify",
        )
        rendered = chat_template is not None or instruction is not None
        require(
            self._is_classifier or not rendered,
            f"{self._pooling.architecture} embeds each text by itself: a chat_template or an "
            "instruction of the pair is for models with one class",
        )
        require(
            chat_template is not None or instruction is None,
            "an instruction needs a chat_template that has a place for it",
        )
        require(
            chat_template is not None or not self._pooling.label_tokens,
            "classifier_from_token needs a chat_template with the question; for "
            "Qwen3-Reranker add 'is_original_qwen3_reranker': True to hf_overrides",
        )
        self._template, self._instruction = chat_template, instruction
        self._params = with_task(params, "classify" if self._is_classifier else "embed")
        if truncate_prompt_tokens is not None:
            kept = truncate_prompt_tokens  # `replace` checks it
            self._params = replace(self._params, truncate_prompt_tokens=kept)

    def pairs(self, first: list[Prompt], second: list[Prompt]) -> list[tuple[Prompt, Prompt]]:
        """Pair the texts; a single first one is paired with each second one."""
        require(bool(first and second), f"{len(first)} and {len(second)} texts make no pairs")
        require(
            len(first) in (1, len(second)),
            f"{len(first)} texts cannot be paired with {len(second)}: pass one, or as many",
        )
        return list(zip(first * (len(second) // len(first)), second, strict=True))

    def requests(
        self,
        pairs: list[tuple[Prompt, Prompt]],
        new_id: Callable[[], str],
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[Request]:
        """Yield the requests of all pairs, in an order that `outputs` expects."""
        prompts: Iterable[Prompt]
        if self._is_classifier:
            prompts = (self._prompt(*pair) for pair in pairs)
        else:
            prompts = [*self._firsts(pairs), *(second for _, second in pairs)]
        for prompt in prompts:
            if cache_salt is not None:
                prompt = salted(prompt, cache_salt)
            own = prompt, self._params, priority, lora_request
            yield pooling_request(self._engine, new_id(), *own)

    def outputs(
        self, pairs: list[tuple[Prompt, Prompt]], outputs: list[RequestOutput]
    ) -> list[ScoringRequestOutput]:
        """Return the scores of all pairs, in their order."""
        if self._is_classifier:
            return [_scored(float(pooled_of(output)[0]), output) for output in outputs]
        num_first = len(self._firsts(pairs))
        firsts, seconds = outputs[:num_first], outputs[num_first:]
        if num_first == 1:
            firsts = firsts * len(seconds)
        return [
            _scored(_cosine(pooled_of(one), pooled_of(other)), one, other)
            for one, other in zip(firsts, seconds, strict=True)
        ]

    def _firsts(self, pairs: list[tuple[Prompt, Prompt]]) -> list[Prompt]:
        """Return the first texts; one that is the same object in all pairs is computed once."""
        first = pairs[0][0]
        is_one = all(other is first for other, _ in pairs)
        return [first] if is_one else [one for one, _ in pairs]

    def _prompt(self, first: Prompt, second: Prompt) -> Prompt:
        """Return the prompt of a pair for a model with one class."""
        for text in (first, second):
            is_text = isinstance(text, str)
            require(is_text, f"{shown(text)} must be a string: a pair becomes one prompt")
        most = self._params.truncate_prompt_tokens
        if most is not None:
            limit = self._engine.input_processor.max_prompt_len
            most = limit if most == -1 else most
        if self._template is not None:
            return self._rendered(first, second, most)
        require(
            self._engine.tokenizer is not None,
            "pairs of strings need a tokenizer, and this engine has none",
        )
        if most is None:
            for text in (first, second):
                self._engine.input_processor.text_limit.check(text)
        return self._engine.tokenizer.encode_pair(first, second, most)

    def _rendered(self, first: Prompt, second: Prompt, most: int | None) -> Prompt:
        """Return the prompt of a pair by the template, whose end may not be cut off."""
        messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
        if self._instruction is not None:
            messages.insert(0, {"role": "system", "content": self._instruction})
        (prompt,) = prompts_of(self._engine, [messages], chat_template=self._template)
        num_tokens = len(prompt["prompt_token_ids"])
        require(
            most is None or num_tokens <= most,
            f"truncate_prompt_tokens={most} would cut off the end of the template, which the score "
            f"is read from: the pair has {num_tokens} tokens; shorten its texts",
        )
        return prompt


def salted(prompt: Prompt, cache_salt: str) -> Prompt:
    """Return a prompt that shares cached prefixes only with prompts of the same salt."""
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": cache_salt}
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt, "cache_salt": cache_salt}


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.clip(a @ b / lengths, -1, 1)) if lengths else 0.0


def _scored(score: float, *outputs: RequestOutput) -> ScoringRequestOutput:
    token_ids = [token_id for output in outputs for token_id in output.prompt_token_ids]
    cached = [output.num_cached_tokens for output in outputs]
    return ScoringRequestOutput(
        outputs[0].request_id,
        ScoringOutput(score),
        token_ids,
        num_cached_tokens=None if None in cached else sum(map(int, filter(None, cached))),
    )
