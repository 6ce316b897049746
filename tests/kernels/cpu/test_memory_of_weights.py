"""What becomes of a weight takes its own memory and little beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve import LLM, SamplingParams
from nanoserve.models.layers import embedding

pytest.importorskip("numba")

from tiny_checkpoints import make_qwen3

from nanoserve.kernels.cpu import integer_linear
from nanoserve.kernels.cpu.float_linear import FloatPanels
from nanoserve.kernels.cpu.integer_linear import pack_codes
from nanoserve.kernels.cpu.isa import KINDS
from nanoserve.kernels.cpu.packing import PANEL, pack, rows_of
from nanoserve.models.quantization import linear_methods
from nanoserve.models.quantization.cpu_method import FormLinearMethod, IntegerLinearMethod
from nanoserve.models.quantization.online import quantize_int4, quantize_int8


class Largest(TorchDispatchMode):
    """Remembers the most bytes that any result of an operator had."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and func._schema.returns[0].alias_info is None:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("kind", KINDS)  # packing needs none of their instructions
def test_integers_are_packed_some_panels_at_a_time(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    own = KINDS[kind]
    weight = torch.randn(8 * PANEL + 5, 256)
    matrix = quantize_int8(weight) if own.bits == 8 else quantize_int4(weight, 32)
    codes = matrix.operands()[0]
    whole = pack_codes(codes, own)
    monkeypatch.setattr(integer_linear, "_PIECE", 2 * PANEL * 256)
    with Largest() as largest:
        pieces = pack_codes(codes, own)
    assert torch.equal(pieces, whole)
    assert largest.num_bytes <= 2 * PANEL * 256
    is_rewritten = own.bits == 4 or own.shift != 0  # else the codes are packed as they are
    assert (largest.num_bytes > 0) == is_rewritten


@pytest.mark.parametrize("dtype, depth", [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)])
def test_rows_come_back_out_of_panels(dtype: str, depth: int) -> None:
    weight = torch.randn(3 * PANEL + 7, 33).to(getattr(torch, dtype))
    indices = torch.tensor([0, 1, PANEL - 1, PANEL, 3 * PANEL + 6, 1], dtype=torch.int32)
    assert torch.equal(rows_of(pack(weight, depth), indices, 33), weight[indices.long()])
    for beyond in (-1, 4 * PANEL):
        with pytest.raises(IndexError):
            rows_of(pack(weight, depth), torch.tensor([0, beyond]), 33)


def answer(path: Path, **options: Any) -> tuple[Any, list[Any]]:
    """The model, and what it says with its log-probabilities."""
    llm = LLM(str(path), skip_tokenizer_init=True, device="cpu", num_kv_blocks=16, **options)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
    (output,) = llm.generate([[1, 5, 9, 2]], params, use_tqdm=False)
    return llm.engine.executor.model, [output.outputs[0].token_ids, output.outputs[0].logprobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_large_embedding_is_looked_up_in_the_head_that_is_tied_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, load_format: str
) -> None:
    choice = linear_methods.choose_form(torch.float32, 0)._replace(make=FloatPanels)
    monkeypatch.setattr(linear_methods, "choose_form", lambda *_: choice)
    make_qwen3(tmp_path, dtype=dtype, tie_word_embeddings=True)
    options = {"dtype": dtype, "load_format": load_format}
    model, expected = answer(tmp_path, **options)
    assert model.model.embed_tokens.weight is not None  # small: a copy is faster
    monkeypatch.setattr(embedding, "SHARED_FROM", 1)
    model, said = answer(tmp_path, **options)
    assert model.model.embed_tokens.weight is None and said == expected
    assert not any("embed_tokens" in name for name, _ in model.named_parameters())


@pytest.mark.small(quantization=[None])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_tied_head_gets_its_form_before_other_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """The two copies that this takes would else come on top of all others."""
    made: list[Any] = []

    def spy(kind: type, name: str) -> None:
        method = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, layer, *a: made.append(layer) or method(self, layer, *a)
        )

    make_qwen3(tmp_path, dtype="bfloat16", tie_word_embeddings=True)
    if quantization:
        spy(IntegerLinearMethod, "fill")
    else:
        spy(FormLinearMethod, "process_after_loading")
    model, _ = answer(tmp_path, dtype="bfloat16", quantization=quantization)
    assert made[0] is model.lm_head and len(made) > 4
    assert sum(layer is model.lm_head for layer in made) == 1
