"""The parameters of a pooling request, under vLLM's names and with its defaults."""

from dataclasses import dataclass
from typing import Any

from nanoserve.utils.checks import check_bool, check_choice, check_int, require, shown

POOLING_TYPES = ("LAST", "MEAN", "CLS", "ALL")
# vLLM's names of what a request is for; those of tokens return a row for each token.
TASKS = ("embed", "classify", "token_embed", "token_classify")


_OF_ENGINE = ("pooling_type", "normalize", "use_activation")


@dataclass
class PoolingParams:
    """The parameters that control how hidden states become the result of a request.

    pooling_type: "LAST" (the last token's), "MEAN" (of all tokens), "CLS" (the first token's) or
        "ALL" (those of all tokens, one row each). None: the checkpoint's, or that of
        `pooler_config`, or "LAST".
    normalize: scale each vector to length 1. None: as the checkpoint says, or True. It is for
        embeddings.
    dimensions: only the first numbers of each vector, before it is normalized, which models that
        were trained for it (Matryoshka representation learning, Kusupati et al. 2022) allow.
    use_activation: for classes, return probabilities (softmax or sigmoid, as the checkpoint says)
        instead of logits. None is True. For embeddings it is vLLM's newer name of `normalize`.
    task: "embed", "classify", or for a row of each token "token_embed" or "token_classify". None:
        what the model does.
    truncate_prompt_tokens: keep only this number of tokens: the first ones, and special tokens that
        the tokenizer adds at the end. -1 keeps as many as the model takes. None: a prompt that is
        too long is an error.

    Raises `ValueError` for values out of range.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    task: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pooling_type is not None:
            check_choice("pooling_type", self.pooling_type, POOLING_TYPES)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.dimensions is not None:
            self.dimensions = check_int("dimensions", self.dimensions, 1)
        if self.task is not None:
            check_choice("task", self.task, TASKS)
        if self.truncate_prompt_tokens is not None:
            kept = check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            require(kept != 0, "truncate_prompt_tokens=0 leaves no token to pool")
            self.truncate_prompt_tokens = kept
        by_token = self.task is not None and self.task.startswith("token_")
        require(
            not by_token or self.pooling_type in (None, "ALL"),
            f"task={self.task!r} returns a row for each token: pooling_type={self.pooling_type!r} "
            "must be 'ALL', or omitted",
        )


def check_pooler_config(options: Any) -> None:
    """Raise `ValueError` unless `options` has names and values that `pooler_config` may have."""
    is_mapping = isinstance(options, dict)
    require(is_mapping, f"pooler_config={shown(options)} must be a dictionary")
    unknown = sorted(map(str, options.keys() - {*_OF_ENGINE}))
    require(not unknown, f"pooler_config: {unknown} are not among {[*_OF_ENGINE]}")
    PoolingParams(**options)
