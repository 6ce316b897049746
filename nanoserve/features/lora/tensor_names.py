"""Finds the matrix of the model that each tensor of an adapter belongs to."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from nanoserve.features.lora.adapter_config import AdapterConfig
from nanoserve.utils.checks import require

Shapes = Mapping[str, tuple[int, int]]  # by the name of a matrix: (outputs, inputs)

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_MOST_MODULES = 100_000
_MERGE = "merge the adapter into its base (peft: merge_and_unload) and load that"
# Parts of other names, and what they are.
_OTHERS = {
    "lora_magnitude_vector": "DoRA",
    "embed_tokens.": "an adapted embedding",
    "lm_head.": "an adapted LM head",
    "lora_embedding_": "an adapted embedding",
    "modules_to_save": "a layer of the adapter's own (modules_to_save)",
    "token_adapter": "embeddings of the adapter's own",
    ".bias": "a bias of the adapter's own",
    ".base_layer.": "a weight of the base",
}
_MODULES = {
    "embed_tokens": "an adapted embedding",
    "lm_head": "an adapted LM head",
    "experts": "adapted experts",
}
# Checkpoints may have one matrix where models here have several outputs, in this order.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
}


class TensorNames:
    """The tensors of one adapter, which are added one by one.

    where: begins every message. shapes: of the model's matrices. max_rank: the largest rank.
    """

    def __init__(self, where: str, config: AdapterConfig, shapes: Shapes, max_rank: int) -> None:
        self._where, self._config = where, config
        self._shapes, self._max_rank = shapes, max_rank
        # By module: the names of A and B, and their shapes.
        self._found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor. Raises `ValueError` for unknown names and unsuitable shapes."""
        where = f"{self._where}: {name:.200}"
        match = _NAME.fullmatch(name)
        if match is None:
            found = [what for part, what in _OTHERS.items() if part in name]
            what = f"is {found[0]}, which is not supported; {_MERGE}" if found else (
                "is not a tensor of LoRA: expected base_model.model.MODULE.lora_A.weight or lora_B"
            )  # fmt: skip
            raise ValueError(f"{where} {what}")
        module, kind = match.groups()
        own = self._found.setdefault(module, {})
        require(kind not in own, f"{where}: {own.get(kind, ('',))[0]} is the same tensor")
        self._check_count(where)
        targets = self._targets(module, where)
        outputs = sum(self._shapes[target][0] for target in targets)
        inputs, rank = self._shapes[targets[0]][1], self._config.rank_of(module)
        require(
            rank <= self._max_rank,
            f"{where}: rank {rank} exceeds max_lora_rank={self._max_rank}, an option of the engine",
        )
        expected = (rank, inputs) if kind == "A" else (outputs, rank)
        require(
            shape == expected,
            f"{where} has shape {list(shape)}; with this model and rank {rank} it must be "
            f"{list(expected)}",
        )
        own[kind] = (name, shape)

    def check_complete(self) -> None:
        """Raise `ValueError` if A or B of a module is missing, or if there is no tensor."""
        require(bool(self._found), f"{self._where} has no tensors")
        for module, own in self._found.items():
            for kind, other in ("AB", "BA"):
                require(
                    kind in own,
                    f"{self._where}: {own.get(other, ('',))[0]} has no lora_{kind}: {module:.200} "
                    f"needs both",
                )
        counts = Counter(target for target, _ in self.pairs())
        target, count = counts.most_common(1)[0]
        require(count == 1, f"{self._where} has the matrices of {target} {count} times")

    def pairs(self) -> Iterator[tuple[str, tuple[str, str, slice]]]:
        """Yield the model's matrices, each with the names of A and B, and its rows of B."""
        for module, own in self._found.items():
            start = 0
            for target in self._targets(module, self._where):
                end = start + self._shapes[target][0]
                yield target, (own["A"][0], own["B"][0], slice(start, end))
                start = end

    def module_of(self, name: str) -> str:
        match = _NAME.fullmatch(name)
        return "" if match is None else match[1]

    def _check_count(self, where: str) -> None:
        is_few = len(self._found) <= _MOST_MODULES
        require(is_few, f"{where}: there are more than {_MOST_MODULES} modules")

    def _targets(self, module: str, where: str) -> list[str]:
        """Return the model's matrices that a module has, in the order of its outputs."""
        for name in _own_names(module):
            if name in self._shapes:
                return [name]
            parent, _, last = name.rpartition(".")
            parts = [f"{parent}.{part}" for part in _FUSED.get(last, ())]
            if parts and all(part in self._shapes for part in parts):
                return parts
        for part, what in _MODULES.items():
            if part in module.split("."):
                raise ValueError(f"{where} is {what}, which is not supported; {_MERGE}")
        example = next(iter(self._shapes), "none")
        raise ValueError(
            f"{where}: {module:.200} is not a linear layer of this model that takes adapters; "
            f"{example} is one of {len(self._shapes)}"
        )


def _own_names(module: str) -> list[str]:
    """Return the names that the model may have for a module of the adapted one.

    The base of a pooling model has no prefix, and the text part of a multimodal one another.
    """
    names = [module, f"model.{module}", module.replace("language_model.model.", "model.")]
    return [*names, module.replace("model.language_model.", "model.")]
