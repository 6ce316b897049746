"""`PoolingConfig` says how a model pools: which hidden states, and what becomes of them.

`config.json` has the settings of classifiers. How embeddings are pooled is written in files of
sentence-transformers: `modules.json` and `1_Pooling/config.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.config_json import read_json
from nanoserve.utils.checks import check_int, is_int, require, shown

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
CLASSIFIER = "ForSequenceClassification"
# Entries of config.json that concern pooling; no decoder reads them.
OWN_ENTRIES = (
    *("num_labels", "id2label", "label2id", "problem_type", "sentence_transformers"),
    *("classifier_from_token", "method", "is_original_qwen3_reranker"),
    *("is_matryoshka", "matryoshka_dimensions", "is_causal"),
)
# Names of `torch.nn` by which a cross-encoder's file calls its activation, and ours.
_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_TYPES = {"lasttoken": "LAST", "mean": "MEAN", "cls": "CLS"}
_MODE = "pooling_mode_"
_WITH_LM_HEAD = ("HeadModel", "HeadsModel", "MTModel")
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class PoolingConfig:
    """The settings of a model that pools; a request may choose others.

    architecture: in `config.json`. decoder: the name of the same model with an LM head.
    dimensions: the lengths to which embeddings may be cut, if the file limits them.
    labels: names of the classes, for a classifier; empty for embeddings.
    label_tokens: ids of tokens whose rows of the LM head are the classes; the difference of two is
        one score.
    activation: of scores, "softmax", "sigmoid" or "none".
    is_qwen3_reranker: True if a query and a document are scored in the template of Qwen3-Reranker.
    """

    architecture: str
    decoder: str
    pooling_type: str = "LAST"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    label_tokens: tuple[int, ...] = ()
    activation: str = "none"
    is_qwen3_reranker: bool = False

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @classmethod
    def of(
        cls,
        architecture: str,
        decoder: str,
        raw: Mapping[str, Any],
        folder: Path | None,
        options: Mapping[str, Any],
    ) -> "PoolingConfig":
        """Return what config.json (`raw`), the files in `folder` and `pooler_config` say.

        Raises `ValueError` for settings that would change the result and are not supported.
        """
        config = cls(architecture, decoder, dimensions=_dimensions(raw))
        if architecture.endswith(CLASSIFIER) or raw.get("classifier_from_token"):
            config = _classifier(config, raw, folder)
        elif folder is not None and (folder / MODULES).is_file():
            config = _of_sentence_transformers(config, folder)
        return _with_options(config, options)


def only_pools(architecture: str, folder: Path | None) -> bool:
    """Return True if a checkpoint can only pool, or is one of sentence-transformers."""
    if architecture.endswith(_WITH_LM_HEAD):
        return False
    if architecture.endswith(("Model", CLASSIFIER)):
        return True
    is_decoder = architecture.endswith("ForCausalLM")
    return is_decoder and folder is not None and (folder / MODULES).is_file()


def _dimensions(raw: Mapping[str, Any]) -> tuple[int, ...]:
    allowed = raw.get("matryoshka_dimensions") or []
    is_good = isinstance(allowed, list) and all(map(is_int, allowed))
    require(is_good, f"config.json: matryoshka_dimensions={shown(allowed)} must be integers")
    return tuple(allowed)


def _classifier(
    config: PoolingConfig, raw: Mapping[str, Any], folder: Path | None
) -> PoolingConfig:
    names, tokens = raw.get("id2label"), _label_tokens(raw.get("classifier_from_token"), folder)
    if tokens:
        count = 1 if len(tokens) == 2 else len(tokens)
    else:
        count = raw.get("num_labels", 2 if names is None else len(names))
    count = check_int("config.json: num_labels", count, 1, 2**16)
    if not isinstance(names, Mapping) or len(names) != count:
        names = {}
    return replace(
        config,
        labels=tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count)),
        label_tokens=tokens,
        normalize=False,
        activation=_activation(raw, count),
        is_qwen3_reranker=raw.get("is_original_qwen3_reranker") is True,
    )


def _activation(raw: Mapping[str, Any], num_labels: int) -> str:
    """Return how scores become probabilities: by the file's own function, or by its problem."""
    own = raw.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    if named is not None:
        name = str(named).rpartition(".")[2]
        require(name in _ACTIVATIONS, f"config.json: activation_fn={shown(named)} is not supported")
        return _ACTIVATIONS[name]
    problem = raw.get("problem_type")
    if problem == "regression":
        return "none"
    is_single = num_labels == 1 or problem == "multi_label_classification"
    return "sigmoid" if is_single else "softmax"


def _label_tokens(value: Any, folder: Path | None) -> tuple[int, ...]:
    """Return the ids of vLLM's `classifier_from_token`, tokens whose logits are the classes'."""
    if not value:
        return ()
    rule = f"classifier_from_token={shown(value)} must be a list of tokens, or of their ids"
    require(isinstance(value, list), rule)
    ids: list[Any] = list(value)
    if not all(map(is_int, value)):
        file = None if folder is None else folder / "tokenizer.json"
        has_file = file is not None and file.is_file()
        require(has_file, f"{rule}; there is no tokenizer.json with the ids of tokens")
        from tokenizers import Tokenizer

        vocabulary = Tokenizer.from_file(str(file))
        ids = [vocabulary.token_to_id(str(token)) for token in value]
    require(None not in ids, f"{rule}; their ids are {ids}, and None is no token")
    return tuple(map(int, ids))


def _of_sentence_transformers(config: PoolingConfig, folder: Path) -> PoolingConfig:
    kinds = _kinds_of_modules(folder / MODULES)
    others = sorted({*kinds} - {"Transformer", "Pooling", "Normalize"})
    require(
        not others,
        f"{folder / MODULES} has modules of the types {others}; only Transformer, Pooling and "
        "Normalize are supported: without the file, the model's own hidden states are pooled",
    )
    config = replace(config, normalize="Normalize" in kinds)
    if not (folder / POOLING).is_file():
        return config
    modes = _modes(read_json(folder / POOLING))
    require(
        len(modes) == 1 and modes[0] in _TYPES,
        f"{folder / POOLING} pools by {modes}; exactly one of {sorted(_TYPES)} is supported",
    )
    return replace(config, pooling_type=_TYPES[modes[0]])


def _kinds_of_modules(file: Path) -> list[str]:
    """Return the names of the modules' classes, without their packages."""
    require(file.stat().st_size <= _MOST_BYTES, f"{file} must be at most {_MOST_BYTES} bytes")
    try:
        modules = json.loads(file.read_bytes())
        return [str(module["type"]).rpartition(".")[2] for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is not a list of modules with types: {error!r:.200}") from error


def _modes(file: Mapping[str, Any]) -> list[str]:
    """Return the ways of pooling that are switched on, in the file's old form or in its new one."""
    new = file.get("pooling_mode")
    if new is not None:
        return list(map(str, new)) if isinstance(new, list) else [str(new)]
    names = [name for name, value in file.items() if name.startswith(_MODE) and value is True]
    return [n.removeprefix(_MODE).removesuffix("_token").removesuffix("_tokens") for n in names]


def _with_options(config: PoolingConfig, options: Mapping[str, Any]) -> PoolingConfig:
    """Apply the option `pooler_config`, whose names and values have been checked."""
    given = {name: value for name, value in options.items() if value is not None}
    activates = given.pop("use_activation", None)
    if not config.is_classifier:
        given = ({} if activates is None else {"normalize": activates}) | given
        return replace(config, **given)
    require(
        not given.get("normalize"),
        f"pooler_config: normalize=True is for embeddings, and {config.architecture} returns "
        "scores: use use_activation",
    )
    return replace(config, **given, activation="none" if activates is False else config.activation)
