"""Every form of a weight gives the products of the plain one, and the engine uses what it is told.

Forms: oneDNN's order, ours, both in one memory, and torch's own.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_checkpoints import make_checkpoint, make_qwen3
from torch import Tensor
from transformers import MixtralForCausalLM

pytest.importorskip("numba")

from nanoserve import LLM, SamplingParams
from nanoserve.kernels.cpu import packed_linear
from nanoserve.kernels.cpu.float_linear import FloatPanels, SharedPanels, shares_memory
from nanoserve.kernels.cpu.gemm_select import Choice
from nanoserve.kernels.cpu.torch_linear import Packed, Plain, WidenedTiles
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.models.quantization import linear_methods
from nanoserve.models.quantization.cpu_method import FormLinearMethod

needs_packing = pytest.mark.skipif(
    not packed_linear.works(), reason="needs a processor that packs bfloat16"
)
needs_sharing = pytest.mark.skipif(
    not packed_linear.works() or not shares_memory(), reason="needs oneDNN to pack as we do"
)
FORMS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "plain": Plain,
    "oneDNN packed": Packed,
    "own tiles": FloatPanels,
    "shared": functools.partial(SharedPanels, num_rows=4),
    "widened tiles": WidenedTiles,
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[Tensor], Callable[[Tensor], Tensor]]:
    if request.param == "oneDNN packed" and not packed_linear.works():
        pytest.skip("needs a processor that packs bfloat16")
    if request.param == "shared" and not (packed_linear.works() and shares_memory()):
        pytest.skip("needs oneDNN to pack as we do")
    return FORMS[request.param]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_near(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Sums of float32 and one rounding to bfloat16."""
    wide, wide_weight = x.double(), weight.double()
    bound = 2**-8 * (wide @ wide_weight.T).abs() + 1e-5 * (wide.abs() @ wide_weight.abs().T)
    assert ((y.double() - wide @ wide_weight.T).abs() <= bound).all()


@pytest.mark.small(num_rows=[5])
@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_linears_are_those_of_plain_weights(form, num_rows: int, has_bias: bool) -> None:
    context = LayerContext(torch.bfloat16, linear_method=FormLinearMethod(form))
    x, weight, bias = random(num_rows, 48), random(103, 48), random(103)
    for linear in (
        ColumnParallelLinear(48, {"a": 70, "b": 33}, context, bias=has_bias),
        RowParallelLinear(48, 103, context, bias=has_bias),
    ):
        linear.weight.copy_(weight)
        if has_bias:
            linear.bias.copy_(bias)
        linear.process_after_loading()
        assert linear.weight is None and type(linear.form) is getattr(form, "func", form)
        y = linear(x)
        if has_bias:
            torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=2e-2, atol=0.1)
        else:
            assert_near(y, x, weight)


@needs_sharing
def test_one_memory_is_read_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where oneDNN pads to other sizes than we do, and reads it alone."""
    shared = 0
    for outputs, inputs in (
        (64, 2), (64, 64), (128, 64), (200, 130), (65, 3), (1, 1), (37, 50), (300, 31), (256, 255),
    ):  # fmt: skip
        weight = random(outputs, inputs)
        both, ours, theirs = SharedPanels(weight, 8), FloatPanels(weight), Packed(weight)
        is_shared = both._num_rows == 8
        shared += is_shared
        for num_rows in (1, 2, 7, 8, 9, 70):
            x = random(num_rows, inputs)
            expected = ours(x) if is_shared and num_rows < 8 else theirs(x)
            assert torch.equal(both(x), expected), (outputs, inputs, num_rows)
            assert_near(ours(x), x, weight)
            assert_near(theirs(x), x, weight)
    assert shared >= 3


@needs_packing
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@torch.inference_mode()
def test_weights_of_more_than_a_large_page_are_put_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    madvise = ctypes.CDLL(None).madvise

    def record(address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
        asked.append((address.value, length.value, advice))
        return madvise(address, length, advice)

    monkeypatch.setattr(packed_linear.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=record))
    for outputs in (512, 8192):  # of 1 KiB each
        weight, x = random(outputs, 512), random(2, 512)
        packed = Packed(weight)
        assert_near(packed(x), x, weight)
    ((first, length, advice),) = asked
    start = torch.ops.mkldnn.data_ptr(packed.weight)
    assert first % 2**21 == length % 2**21 == 0 and advice == 25
    assert first <= start < first + 2**21
    assert start + 2**23 <= first + length < start + 2**23 + 2**21


@pytest.fixture(scope="module", params=["untied", "tied", "experts"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[tuple[Path, list]]:
    """And what the plain form answers."""
    path = tmp_path_factory.mktemp("model")
    if request.param == "experts":
        make_checkpoint(MixtralForCausalLM, path, dtype="bfloat16", num_local_experts=4)
    else:
        make_qwen3(path, dtype="bfloat16", tie_word_embeddings=request.param == "tied")
    with pytest.MonkeyPatch.context() as patch:
        yield path, logprobs(path, Plain, patch)


def logprobs(path: Path, form: Callable, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    chosen = lambda dtype, num_bytes, batch_invariant: Choice("this", form)  # noqa: E731
    monkeypatch.setattr(linear_methods, "choose_form", chosen)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    options = {"device": "cpu", "attention_backend": "torch", "skip_tokenizer_init": True}
    with LLM(path, **options) as llm:
        model = llm.engine.executor.model
        own = getattr(form, "func", form)
        assert type(model.lm_head.form) is type(model.model.layers[1].self_attn.o_proj.form) is own
        assert model.lm_head.weight is None
        assert model.model.embed_tokens.weight.layout == torch.strided
        mlp = model.model.layers[0].mlp
        assert not hasattr(mlp, "down") or {type(each) for each in mlp.down} == {own}
        outputs = llm.generate([[5, 7, 11], list(range(40))], params, use_tqdm=False)
    return [output.outputs[0].logprobs[0] for output in outputs]


def test_the_engine_answers_as_with_plain_weights(
    checkpoint: tuple[Path, list], form, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = checkpoint
    for found, plain in zip(logprobs(path, form, monkeypatch), expected, strict=True):
        common = found.keys() & plain.keys()
        assert len(common) >= 4
        assert all(abs(found[t].logprob - plain[t].logprob) < 0.1 for t in common)


def test_whether_torch_packs_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    works = packed_linear.works.__wrapped__
    for broken in (AttributeError, RuntimeError):

        def refuse(weight: Tensor, error: type[Exception] = broken) -> Tensor:
            raise error("no such operator")

        monkeypatch.setattr(packed_linear, "pack", refuse)
        assert not works()
    monkeypatch.setattr(packed_linear, "pack", lambda weight: weight)
    monkeypatch.setattr(packed_linear, "linear", lambda x, weight: torch.zeros(2, 6).bfloat16())
    assert not works()  # operators that are there and wrong
