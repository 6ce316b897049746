"""vLLM's names in a `speculative_config`."""

from collections.abc import Mapping
from typing import Any

from nanoserve.utils.checks import require, shown

# By name: what to do instead, and the values that ask for what is done anyway; none: all do.
FOREIGN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "parallel_drafting": ("a draft model guesses one token after another", (False,)),
    "disable_padded_drafter_batch": ("guesses of a step are one batch", ()),
    "draft_tensor_parallel_size": ("a draft model runs whole on each rank", (1,)),
    "max_model_len": ("it is the engine's", ()),
    "code_revision": ("no code of a checkpoint runs for a model", ()),
    "disable_by_batch_size": ("adaptive=True guesses only where it pays", ()),
    "disable_logprobs": ("log-probabilities are those of the model", (True, False)),
    "rejection_sample_method": ("a guess is right if it is what was sampled", ("strict",)),
    "speculative_token_tree": ("guesses are a row, not a tree", ("",)),
}
_METHODS = {
    **dict.fromkeys(
        ("eagle", "eagle3", "medusa", "mtp", "mlp_speculator", "deepseek_mtp"),
        "heads of this kind are not read; 'hidden_head' is nanoserve's own, 'draft_model' takes a "
        "smaller model, and 'ngram' and 'suffix' need none",
    ),
}


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `speculative_config` without what only vLLM has.

    Raises `ValueError` for a method of vLLM's, and for an option of vLLM's that asks for something
    which is not done here. Names that nobody knows stay: `SpeculativeConfig` refuses them.
    """
    told = _METHODS.get(str(options.get("method")))
    require(told is None, f"method={options.get('method')!r} is vLLM's and not implemented: {told}")
    for name in options.keys() & FOREIGN.keys():
        instead, neutral = FOREIGN[name]
        require(
            not neutral or options[name] in (None, *neutral),
            f"{name}={shown(options[name])} in speculative_config is vLLM's and not implemented: "
            f"{instead}",
        )
    return {name: value for name, value in options.items() if name not in FOREIGN}
