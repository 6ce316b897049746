"""Options of vLLM's `speculative_config`."""

from collections.abc import Mapping
from typing import Any

from nanoserve.utils.checks import require, shown

# By name: the reason or what to use instead, and the values that are accepted; (): any value.
FOREIGN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "parallel_drafting": ("a draft model drafts one token after another", (False,)),
    "disable_padded_drafter_batch": ("draft tokens of a step are one batch", ()),
    "draft_tensor_parallel_size": ("a draft model is replicated on each rank", (1,)),
    "max_model_len": ("the engine's max_model_len applies", ()),
    "code_revision": ("code in a checkpoint is never run for a model", ()),
    "disable_by_batch_size": ("adaptive=True drafts only where it pays", ()),
    "disable_logprobs": ("log-probabilities come from the target model", (True, False)),
    "rejection_sample_method": ("a draft token equal to the sampled one is accepted", ("strict",)),
    "speculative_token_tree": ("draft tokens are a sequence, not a tree", ("",)),
}
_METHODS = {
    **dict.fromkeys(
        ("eagle", "eagle3", "medusa", "mtp", "mlp_speculator", "deepseek_mtp"),
        "heads of this kind cannot be loaded; use 'hidden_head' (nanoserve's own head), "
        "'draft_model' (a smaller model), 'ngram' or 'suffix' (no model)",
    ),
}


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `speculative_config` without the options that only vLLM has.

    Raises `ValueError` for a method that only vLLM has, and for an option of vLLM with a value that
    is not supported here. Unknown names are kept, for `SpeculativeConfig` to reject.
    """
    advice, method = _METHODS.get(str(options.get("method"))), options.get("method")
    require(advice is None, f"method={method!r} is vLLM's and not supported: {advice}")
    for name in options.keys() & FOREIGN.keys():
        instead, neutral = FOREIGN[name]
        require(
            not neutral or options[name] in (None, *neutral),
            f"{name}={shown(options[name])} in speculative_config is vLLM's and not supported: "
            f"{instead}",
        )
    return {name: value for name, value in options.items() if name not in FOREIGN}
