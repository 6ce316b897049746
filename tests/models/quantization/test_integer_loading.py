"""Integers are made while a model is loaded: in little memory, and of nothing that does not fit."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CASES, make_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint, make_qwen3
from torch import Tensor
from transformers import MixtralForCausalLM

pytest.importorskip("numba")

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.source import PlainSource
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.quantized_loader import fill
from nanoserve.config import EngineConfig
from nanoserve.kernels.cpu.integer_linear import IntegerPanels
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.quantization.linear_methods import choose_linear_method
from nanoserve.models.quantization.schemes import Scheme
from nanoserve.models.registry import model_class

OPTIONS = {"device": "cpu", "attention_backend": "torch", "skip_tokenizer_init": True}
WIDE = {"hidden_size": 64, "intermediate_size": 96}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)


def num_bytes(weight: Tensor | QuantizedMatrix) -> int:
    return (
        weight.nbytes if isinstance(weight, Tensor) else weight.codes.nbytes + weight.scale.nbytes
    )


class Watch:
    """Which weights, plain and integers, are alive between two of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most_bytes = self.most = self.count = 0
        self._alive: list[weakref.ref] = []
        for owner, name in ((PlainSource, "read"), (Scheme, "to_integers")):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, inner: Any) -> Any:
        def watched(*args: Any) -> Tensor | QuantizedMatrix:
            made = inner(*args)
            self.count += 1
            self._alive.append(weakref.ref(made))
            weights = self.alive()
            self.most = max(self.most, len(weights))
            self.most_bytes = max(self.most_bytes, sum(map(num_bytes, weights)))
            return made

        return watched

    def alive(self) -> list[Tensor | QuantizedMatrix]:
        return [weight for ref in self._alive if (weight := ref()) is not None]


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("has_experts", [False, True])
def test_no_more_than_one_weights_parts_are_in_memory(
    form: str, has_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k and v, or gate and up, or the experts of a layer, are one weight. Of 6 layers."""
    sizes = WIDE | {"num_hidden_layers": 6, "vocab_size": 32}
    if has_experts:
        make_checkpoint(MixtralForCausalLM, tmp_path, num_local_experts=4, **sizes)
    else:
        make_qwen3(tmp_path, **sizes)
    watch = Watch(monkeypatch)
    gc.disable()  # what goes, goes by itself
    try:
        llm = LLM(tmp_path, quantization=form, dtype="float32", **OPTIONS)
    finally:
        gc.enable()
    with llm:
        assert watch.count > 80 and not watch.alive()
        # As integers, and of the last part also as the checkpoint has it.
        parts = 3 * 4 if has_experts else 3
        assert watch.most <= parts + 2
        largest = 96 * 64 * (4 + 1)  # float32 and its codes
        assert watch.most_bytes < (parts + 2) * largest


def change(path: Path, tensors: dict[str, Any]) -> None:
    stored = load_file(path / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({UP: None}, rf"do not match the model: missing: {UP}"),
        ({"model.extra.weight": torch.ones(3)}, r"unexpected: model\.extra\.weight"),
        ({UP: torch.ones(95, 64)}, rf"{UP} is \[95, 64\], not \[96, 64\]"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
@pytest.mark.parametrize("form", ["int8", "gptq"])
def test_what_does_not_fit_is_refused_before_anything_is_read(
    tensors: dict, message: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "int8":
        make_qwen3(tmp_path, **WIDE)
    else:
        make_quantized(tmp_path, *CASES["gptq"])
        if UP in tensors:  # in GPTQ's words
            own, message = UP.removesuffix("weight") + "qweight", "up_proj"
            shape = None if tensors[UP] is None else torch.ones(8, 95, dtype=torch.int32)
            tensors = {own: shape}
    change(tmp_path, tensors)
    for reader in ("formats.source.PlainSource", "formats.gptq.GPTQReader"):
        target = f"nanoserve.checkpoint.{reader}.read"
        monkeypatch.setattr(target, lambda *args: pytest.fail("read"))
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, quantization=form, **OPTIONS)


def test_a_source_without_a_tensor_is_not_read(tmp_path: Path) -> None:
    """Whoever fills a model need not have looked before."""

    class Source:
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {"model.norm.weight": (48,)}

        def read(self, name: str) -> Tensor:
            pytest.fail("read")

    make_qwen3(tmp_path)
    config = ModelConfig.from_checkpoint(tmp_path)
    model = model_class(config.architecture)(config, LayerContext())
    with pytest.raises(ValueError, match=r"do not match the model: missing: .*layers\.0"):
        fill(model, Source(), None, False)


def test_an_lm_head_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    make_qwen3(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, {"lm_head.weight": embedding.clone()})
    LLM(tmp_path, quantization="int8", **OPTIONS).close()
    change(tmp_path, {"lm_head.weight": embedding + 1})
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        LLM(tmp_path, quantization="int8", **OPTIONS)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_random_weights_become_integers_too(form: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path, **WIDE)
    (tmp_path / "model.safetensors").unlink()
    answers = []
    for _ in range(2):
        with LLM(tmp_path, load_format="dummy", quantization=form, **OPTIONS) as llm:
            assert isinstance(llm.engine.executor.model.lm_head.form, IntegerPanels)
            (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert output.error is None and len(output.outputs[0].token_ids) == 4
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_weights_that_are_no_numbers_fail_their_requests(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    weight = load_file(tmp_path / "model.safetensors")[UP]
    weight[3, 5] = torch.nan
    change(tmp_path, {UP: weight})
    with LLM(tmp_path, quantization="int8", **OPTIONS) as llm:
        (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert isinstance(output.error, FloatingPointError)


# ---------------------------------------------------------------- where it cannot be


def test_a_gpu_makes_floats_of_a_quantized_checkpoint_unless_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_qwen3(tmp_path / "plain")
    make_quantized(tmp_path / "gptq", *CASES["gptq"])
    gpu = torch.device("cuda", 0)

    def choose(path: str, **options: Any) -> Any:
        config = EngineConfig(str(tmp_path / path), **options)
        return choose_linear_method(config, ModelConfig.from_checkpoint(tmp_path / path), gpu, 1)

    assert choose("plain") is None and not caplog.text
    assert choose("gptq") is None and "memory as the unquantized model" in caplog.text


def test_activations_of_integers_are_refused_without_numba(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    monkeypatch.setattr("nanoserve.models.quantization.linear_methods.find_spec", lambda name: None)
    options = {"quantization": "int8", "quantization_activations": "int8"}
    with pytest.raises(ValueError, match=r"='int8' needs numba.*'nanoserve\[cpu\]', or set it to"):
        LLM(tmp_path, **options, **OPTIONS)


@pytest.mark.size("full")
def test_without_numba_it_is_said_what_to_install(tmp_path: Path) -> None:
    """In a process that cannot import it at all, and runs floats and integers all the same."""
    make_qwen3(tmp_path)
    options = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    integers = options | {"quantization": "int8"}
    with LLM(tmp_path, quantization_activations="none", **integers) as llm:
        expected = llm.generate([[1, 2, 3]], use_tqdm=False, sampling_params=GREEDY)
    tokens = expected[0].outputs[0].token_ids
    script = f"""
import importlib.util, sys

class NoNumba:
    def find_spec(self, name, *rest):
        if name == "numba":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoNumba())
inner = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else inner(name, *rest)
from nanoserve import LLM, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LLM({str(tmp_path)!r}, **{options}).close()
with LLM({str(tmp_path)!r}, **{integers}) as llm:
    assert "activations stay floats" in repr(llm), llm
    print(llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0].token_ids)
LLM({str(tmp_path)!r}, quantization_activations="int8", **{integers})
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.stdout.strip() == str(tokens), ended.stderr
    assert "ValueError: quantization_activations='int8' needs numba" in ended.stderr
    assert "pip install 'nanoserve[cpu]'" in ended.stderr
