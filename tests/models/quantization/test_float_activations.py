"""`quantization_activations="none"`: an engine answers as one with the dequantized weights does.

With numba, and with torch alone: its form of integers is chosen as if numba were not there.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_models import dequantized, distance, our_logits
from quantized_checkpoints import CASES, make_quantized
from safetensors.torch import save_file
from tiny_checkpoints import edit_json, make_checkpoint, make_qwen3
from torch import Tensor
from transformers import MixtralForCausalLM, Qwen3ForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.cli.describe import describe
from nanoserve.models.quantization.online import quantize_int4, quantize_int8

NONE = {"quantization_activations": "none"}
WIDE = {"hidden_size": 64, "intermediate_size": 96}
# The order of sums in float32. Activations of 8 bits are a hundred times as far, and more.
NEAR = 1e-5
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")


@pytest.fixture(params=["torch", pytest.param("numba", marks=needs_numba)], autouse=True)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(
            "nanoserve.models.quantization.linear_methods.find_spec", lambda name: None
        )


def plain_logits(path: Path, weights: dict[str, Tensor]) -> Tensor:
    """Of an engine with plain float32 weights in the place of `path`'s."""
    folder = path / "plain"
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((path / "config.json").read_text())
    edit_json(folder / "config.json", quantization_config=..., tie_word_embeddings=False)
    return our_logits(folder)


def int8(weight: Tensor, group_size: int | None = None) -> Tensor:
    return quantize_int8(weight, group_size).dequantize()


def int4(weight: Tensor) -> Tensor:
    return quantize_int4(weight, 32).dequantize()


@pytest.mark.small(form=["int4"])
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        (Qwen3ForCausalLM, {"tie_word_embeddings": True}),
        (MixtralForCausalLM, {"num_local_experts": 5}),
    ],
)
def test_logits_are_those_of_the_dequantized_model(
    architecture: Any, settings: dict[str, Any], form: str, tmp_path: Path
) -> None:
    make_checkpoint(architecture, tmp_path, **WIDE, **settings)
    to_floats: Callable[[Tensor], Tensor] = {"int8": int8, "int4": int4}[form]
    expected = plain_logits(tmp_path, dequantized(tmp_path, to_floats))
    found = our_logits(tmp_path, quantization=form, **NONE)
    assert distance(found, expected) < NEAR
    assert distance(our_logits(tmp_path), expected) > 100 * NEAR  # weights are rounded


@pytest.mark.small(case=["gptq, act order", "gptq, uneven groups"])
@pytest.mark.parametrize(
    "case", ["gptq, act order", "gptq, uneven groups", "gptq, 8 bits", "awq", "fp8, blocks"]
)
def test_a_quantized_checkpoint_answers_as_its_floats(case: str, tmp_path: Path) -> None:
    """Of FP8, whose values are no integers, those of 8 bits in groups of 32."""
    weights = make_quantized(tmp_path, *CASES[case])
    rounded = {"fp8, blocks": partial(int8, group_size=32), "gptq, uneven groups": int8}
    if case in rounded:
        own = {n: rounded[case](w) for n, w in weights.items() if "_proj.weight" in n}
        weights |= own
    expected = plain_logits(tmp_path, weights)
    assert distance(our_logits(tmp_path, **NONE), expected) < NEAR


@pytest.mark.small(kind=["Q4_1"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_a_gguf_file_answers_as_its_floats(kind: str, tmp_path: Path) -> None:
    """Token for token, as transformers with the file's numbers does."""
    pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")
    from gguf_models import ModelWriter

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = make_checkpoint(Qwen3ForCausalLM, tmp_path / "checkpoint", **sizes)
    path = tmp_path / "model.gguf"
    ModelWriter(model, "qwen3", kind).write(path, {})
    prompt = [(7 * i * i + i) % 300 for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    options = {"skip_tokenizer_init": True, "device": "cpu", "num_kv_blocks": 8}
    with LLM(path, dtype="float32", max_num_seqs=4, **options, **NONE) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    ours = output.outputs[0]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert ours.token_ids == logits.argmax(dim=1).tolist()
    expected = logits.log_softmax(dim=1).amax(dim=1)
    chosen = [own[t].logprob for own, t in zip(ours.logprobs, ours.token_ids, strict=True)]
    torch.testing.assert_close(torch.tensor(chosen), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_runs_in_16_bits(dtype: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path, **WIDE)
    expected = plain_logits(tmp_path, dequantized(tmp_path, int4))
    found = our_logits(tmp_path, quantization="int4", dtype=dtype, **NONE).float()
    assert NEAR < distance(found, expected) < 0.03


# ---------------------------------------------------------------- what is told, and refused


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_is_told_what_is_rounded(quantization: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path, **WIDE)
    options = {"quantization": quantization, "device": "cpu", "skip_tokenizer_init": True} | NONE
    how = "with a scale per output" if quantization == "int8" else "in groups of 32"
    rounding = describe(str(tmp_path), **options)["rounding"]
    assert rounding == {"weights": f"{quantization} {how}", "activations": "stay floats"}
    with LLM(tmp_path, attention_backend="torch", **options) as llm:
        assert f"(weights {quantization} {how}; activations stay floats)" in repr(llm)


def test_what_a_checkpoint_holds_is_told_once_it_is_read(tmp_path: Path) -> None:
    make_quantized(tmp_path, *CASES["gptq, 8 bits"])
    options = {"device": "cpu", "skip_tokenizer_init": True} | NONE
    assert "as stored" in describe(str(tmp_path), **options)["rounding"]["weights"]
    with LLM(tmp_path, attention_backend="torch", **options) as llm:
        assert "weights int8 in groups of 16; activations stay floats" in repr(llm)


def test_plain_weights_have_no_such_choice(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    message = "quantization_activations='none' needs quantized weights.*quantization='int8'"
    for attention in ("torch", "auto"):
        with pytest.raises(ValueError, match=message):
            LLM(
                tmp_path,
                device="cpu",
                skip_tokenizer_init=True,
                attention_backend=attention,
                **NONE,
            )
    assert "rounding" not in describe(str(tmp_path), device="cpu", skip_tokenizer_init=True)


def test_another_word_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with pytest.raises(ValueError, match=r"quantization_activations='fp8'.*'int8', 'none'"):
        LLM(tmp_path, quantization="int8", quantization_activations="fp8")
