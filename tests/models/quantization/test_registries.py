"""What it takes to add a format of checkpoints, or a way to quantize, from outside."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_qwen3
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.registry import FORMATS, SCHEMES
from nanoserve.checkpoint.formats.source import PlainSource
from nanoserve.models.quantization.online import quantize_int8
from nanoserve.models.quantization.schemes import Scheme
from nanoserve.utils.registry import Registry

OPTIONS = {"device": "cpu", "attention_backend": "torch", "skip_tokenizer_init": True}


def answer(path: Path, **options: str) -> list[int]:
    with LLM(path, **OPTIONS, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return llm.generate([[5, 7, 11]], params)[0].outputs[0].token_ids


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Registered is for good; other tests of this process are to find what there was."""
    before: list[tuple[Registry, dict]] = [(one, dict(one._entries)) for one in (FORMATS, SCHEMES)]
    yield
    for registry, entries in before:
        registry._entries = entries


# ---------------------------------------------------------------------- a format


class Negated(PlainSource):
    """Linears are stored with the other sign."""

    def __init__(self, path: Path, config: dict) -> None:
        super().__init__(path, {})
        self._marks = config["marks"]

    def read(self, name: str) -> Tensor:
        weight = super().read(name)
        return -weight if self._marks in name else weight


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    expected = answer(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: -t if "proj" in name else t for name, t in load_file(file).items()}
    save_file(tensors, file)
    config = {"quant_method": "negated", "marks": "proj"}
    edit_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=r"'negated' is not supported.*gguf"):
        answer(tmp_path)
    FORMATS.register("negated", Negated)
    assert answer(tmp_path) == expected != answer_without_signs(tmp_path)


def answer_without_signs(path: Path) -> list[int]:
    edit_json(path / "config.json", quantization_config=None)
    return answer(path)


# ---------------------------------------------------------------------- a scheme


@dataclass(frozen=True)
class InGroups(Scheme):
    def to_integers(
        self, weight: Tensor | QuantizedMatrix, is_quantized: bool
    ) -> Tensor | QuantizedMatrix:
        assert isinstance(weight, Tensor) and not is_quantized
        return quantize_int8(weight, 32)


def test_a_scheme_of_ones_own(tmp_path: Path) -> None:
    make_qwen3(tmp_path, hidden_size=64, intermediate_size=96)
    with pytest.raises(ValueError, match=r"quantization='int8-groups' is not one of.*'int8'"):
        answer(tmp_path, quantization="int8-groups")
    SCHEMES.register("int8-groups", InGroups(8))
    with LLM(tmp_path, quantization="int8-groups", **OPTIONS) as llm:
        method = llm.engine.executor.model.lm_head.method
        assert method.weights == "int8 in groups of 32"
        assert llm.generate([[5, 7]])[0].outputs[0].token_ids
