"""Methods of `LLM` that pool: `embed`, `classify`, `score` and `encode`, as in vLLM.

`nanoserve.features.pooling` is imported on first use.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import Prompt, as_prompt_list, one_per_prompt
from nanoserve.lora_request import LoRARequest, SeveralAdapters
from nanoserve.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from nanoserve.pooling_params import PoolingParams

if TYPE_CHECKING:
    from pathlib import Path

    from nanoserve.features.progress import UseTqdm

SeveralParams = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods:
    """The methods of an engine with `runner="pooling"`; in others they raise `ValueError`.

    Prompts are as in `LLM.generate`. `pooling_params` is one for all prompts or one per prompt;
    None selects the checkpoint's own way to pool. No request is queued unless every prompt is
    valid. If a request fails, for example because the model computes NaN, its error is raised.
    """

    engine: GuardedEngine

    if TYPE_CHECKING:
        _request_ids: Any

        def _check_paused(self) -> None: ...

        def _run(self, requests: Iterable[Any], use_tqdm: "UseTqdm") -> list[RequestOutput]: ...

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: SeveralParams = None,
        use_tqdm: "UseTqdm" = True,
        *,
        lora_request: SeveralAdapters = None,
        priority: Sequence[int] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool every prompt; the results, `outputs.data`, are float32 tensors.

        pooling_task: the `task` of requests that have none: see `PoolingParams`.
        """
        from nanoserve.features.pooling.results import pooling_output

        outputs = self._pool(
            prompts, pooling_params, use_tqdm, lora_request, priority, pooling_task,
            tokenization_kwargs,
        )  # fmt: skip
        return [pooling_output(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: SeveralParams = None,
        use_tqdm: "UseTqdm" = True,
        *,
        lora_request: SeveralAdapters = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of every prompt, `outputs.embedding`, a list of floats.

        Raises `ValueError` for a model that returns scores.
        """
        from nanoserve.features.pooling.results import embedding_output

        outputs = self._pool(
            prompts, pooling_params, use_tqdm, lora_request, priority, "embed", tokenization_kwargs
        )
        return [embedding_output(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: SeveralParams = None,
        use_tqdm: "UseTqdm" = True,
        *,
        lora_request: SeveralAdapters = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return probabilities of the classes for every prompt, `outputs.probs`.

        Raises `ValueError` for a model without classes.
        """
        from nanoserve.features.pooling.results import classification_output

        outputs = self._pool(
            prompts, pooling_params, use_tqdm, lora_request, priority, "classify",
            tokenization_kwargs,
        )  # fmt: skip
        return [classification_output(output) for output in outputs]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        use_tqdm: "UseTqdm" = True,
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        chat_template: "str | Path | None" = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit together, `outputs.score`: each of `data_1` and of `data_2`.

        A single text of `data_1` is scored with each one of `data_2`. A model with one class scores
        a prompt of both texts; `chat_template`, a file or a string, renders that prompt from
        messages with the roles "query" and "document", and of an `instruction` as "system". A model
        of embeddings returns the cosine of the two embeddings.

        Raises `ValueError` for a model with several classes, and for different numbers of texts.
        """
        from nanoserve.features.pooling.scores import Scorer

        self._check_paused()
        rendering = chat_template, truncate_prompt_tokens, instruction
        scorer = Scorer(self.engine, pooling_params, *rendering)
        pairs = scorer.pairs(as_prompt_list(data_1), as_prompt_list(data_2))
        new_id = lambda: next(self._request_ids)  # noqa: E731
        requests = scorer.requests(pairs, new_id, lora_request=lora_request)
        return scorer.outputs(pairs, self._run(requests, use_tqdm))

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: SeveralParams,
        use_tqdm: "UseTqdm",
        lora_request: SeveralAdapters,
        priority: Sequence[int] | None,
        task: str | None,
        tokenization_kwargs: dict[str, Any] | None,
    ) -> list[RequestOutput]:
        from nanoserve.compat.keywords import tokenized
        from nanoserve.features.pooling.requests import check_pools, pooling_request, with_task

        self._check_paused()
        check_pools(self.engine)
        prompts = as_prompt_list(prompts)
        if tokenization_kwargs:
            prompts = tokenized(self.engine, prompts, tokenization_kwargs)
        params = one_per_prompt("pooling_params", pooling_params, PoolingParams, len(prompts))
        priorities = one_per_prompt("priority", priority, int, len(prompts))
        adapters = one_per_prompt("lora_request", lora_request, LoRARequest, len(prompts))
        requests = (
            pooling_request(
                self.engine,
                next(self._request_ids),
                prompt,
                with_task(one, task),
                value or 0,
                adapter,
            )
            for prompt, one, value, adapter in zip(
                prompts, params, priorities, adapters, strict=True
            )
        )
        return self._run(requests, use_tqdm)
