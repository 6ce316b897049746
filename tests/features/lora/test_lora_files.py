"""Broken and hostile adapter folders: a `ValueError` that names what is wrong, and nothing else."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import request_for, write_adapter, write_files
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_qwen3
from torch import Tensor

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.features.lora import store
from nanoserve.features.lora.adapter import Limits, outline_of, read_adapter
from nanoserve.features.lora.adapter_config import AdapterConfig
from nanoserve.features.lora.adapter_files import AdapterFiles
from nanoserve.features.lora.prepare import check_adapter, limits_of
from nanoserve.worker.adapters import named_tensors

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    base = tmp_path_factory.mktemp("base")
    return base, make_qwen3(base)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Any]) -> Iterator[LLM]:
    options: dict[str, Any] = {"num_kv_blocks": 64, "skip_tokenizer_init": True}
    with LLM(str(model[0]), enable_lora=True, max_lora_rank=8, **options) as engine:
        yield engine


@pytest.fixture
def adapter(model: tuple[Path, Any], tmp_path: Path) -> Path:
    write_adapter(model[1], tmp_path / "adapter")
    return tmp_path / "adapter"


def change(adapter: Path, **tensors: Tensor | None) -> None:
    """Replace or remove tensors: "A" and "B" are those of the first layer's q_proj."""
    file = adapter / "adapter_model.safetensors"
    stored = load_file(file)
    for name, tensor in tensors.items():
        full = f"{Q}.lora_{name}.weight" if len(name) == 1 else name
        stored.pop(full, None)
        if tensor is not None:
            stored[full] = tensor
    save_file(stored, file)


def config(**entries: Any) -> Callable[[Path], None]:
    return lambda adapter: edit_json(adapter / "adapter_config.json", **entries)


def tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    return lambda adapter: change(adapter, **changes)


def content(name: str, content: bytes) -> Callable[[Path], None]:
    def write(adapter: Path) -> None:
        (adapter / name).write_bytes(content)

    return write


def remove(name: str) -> Callable[[Path], None]:
    return lambda adapter: (adapter / name).unlink()


def only_pickled(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def cut(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def longer(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def too_large(adapter: Path) -> None:
    """The scaling of B overflows."""
    edit_json(adapter / "adapter_config.json", lora_alpha=3e38)
    change(adapter, B=torch.full((64, 4), 100.0))


def pipe(adapter: Path) -> None:
    """Reading it would wait for ever."""
    (adapter / "adapter_config.json").unlink()
    os.mkfifo(adapter / "adapter_config.json")


NAN, INF = torch.full((4, 48), torch.nan), torch.full((4, 48), torch.inf)
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
LONG_TYPE = b'{"x": {"dtype": "%s", "shape": [], "data_offsets": [0, 0]}}' % (b"F" * 10**6)
NEGATIVE = b'{"x": {"dtype": "F32", "shape": [-1, 4], "data_offsets": [0, 0]}}'
HEADER = (2**40).to_bytes(8, "little") + b"{}"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove(CONFIG), "adapter_config.json cannot be read"),
    "no tensors": (remove(TENSORS), "adapter_model.safetensors cannot be read"),
    "a pickle": (only_pickled, "adapter_model.bin is a pickle, which can run programs"),
    "a pipe": (pipe, "is not a file"),
    "not JSON": (content(CONFIG, b"{"), "is not JSON"),
    "deep JSON": (content(CONFIG, b'{"r":' + b"[" * 100_000), "is not JSON"),
    "a list": (content(CONFIG, b"[]"), "is not a JSON object"),
    "bytes": (content(CONFIG, b"\xff\xfe"), "is not JSON"),
    "long config": (content(CONFIG, b" " * 2**21), "more than 1048576"),
    "not safetensors": (content(TENSORS, b"PK\x03\x04"), "is not a safetensors file"),
    "a huge header": (content(TENSORS, HEADER), "is not a safetensors file"),
    "cut off": (cut, "is not a safetensors file"),
    "too long": (longer, "is not a safetensors file"),
    "a header of a list": (content(TENSORS, header(b"[]")), "its header is not a JSON object"),
    "a header of no JSON": (content(TENSORS, header(b"{'")), "its header is not JSON"),
    "a deep header": (content(TENSORS, header(b"[" * 100_000)), "its header is not JSON"),
    "no shape": (content(TENSORS, header(b'{"x": {"dtype": "F32"}}')), "x has no type or shape"),
    "a negative shape": (content(TENSORS, header(NEGATIVE)), "x has no type or shape"),
    "a long name": (content(TENSORS, header(b'{"%s": {}}' % (b"x" * 10**6))), "1000000 characters"),
    "a long type": (content(TENSORS, header(LONG_TYPE)), "x has no type or shape"),
    "no tensor but a number": (content(TENSORS, header(b'{"x": 1}')), "x has no type or shape"),
    "another kind": (config(peft_type="PROMPT_TUNING"), "peft_type='PROMPT_TUNING'"),
    "rank 0": (config(r=0), "r=0 must be an integer"),
    "rank as text": (config(r="8"), "r='8' must be an integer"),
    "a huge rank": (config(r=10**12), r"lora_A.*rank 1000000000000 exceeds max_lora_rank=8"),
    "another rank": (config(r=5), r"lora_A.* has shape \[4, 80\].* must be \[5, 80\]"),
    "NaN alpha": (content(CONFIG, b'{"r": 4, "lora_alpha": NaN}'), "lora_alpha=nan must be"),
    "huge alpha": (config(lora_alpha=1e39), "lora_alpha="),
    "too large products": (too_large, "no finite scaled product"),
    "patterns that are none": (config(rank_pattern=[1]), "rank_pattern=.* must be an object"),
    "a slow pattern": (config(alpha_pattern={"(a+)+$": 1}), "repetitions"),
    "a pattern of groups": (config(rank_pattern={"(|)" * 99 + "x": 4}), "groups are not supported"),
    "no pattern": (config(rank_pattern={"": 4}), "must name modules"),
    "a wrong pattern": (config(rank_pattern={"[q_proj": 4}), "pattern .* is invalid"),
    "a rank pattern": (config(rank_pattern={"q_proj": -1}), "must be a number, 1 or more"),
    "biases of LoRA": (config(lora_bias=True), "lora_bias=True is not supported"),
    "an unknown entry": (config(use_magic=True), "use_magic=True is not supported"),
    "the shape of A": (tensors(A=torch.ones(4, 47)), r"q_proj.lora_A.*\[4, 47\].*\[4, 48\]"),
    "the shape of B": (tensors(B=torch.ones(63, 4)), r"q_proj.lora_B.*\[63, 4\].*\[64, 4\]"),
    "a vector": (tensors(A=torch.ones(4)), r"q_proj.lora_A.*has shape \[4\]"),
    "no A": (tensors(A=None), "q_proj.lora_B.weight has no lora_A"),
    "no B": (tensors(B=None), "q_proj.lora_A.weight has no lora_B"),
    "NaN": (tensors(A=NAN), "q_proj.lora_A.weight contains NaN or infinity"),
    "infinity": (tensors(A=INF), "q_proj.lora_A.weight contains NaN or infinity"),
    "integers": (tensors(A=torch.ones(4, 48).char()), "q_proj.lora_A.weight has type I8"),
    "no LoRA": (tensors(**{"model.x": torch.ones(2)}), "model.x is not a tensor of LoRA"),
    "a way out": (tensors(**{"../../etc/passwd": torch.ones(2)}), "is not a tensor of LoRA"),
    "DoRA": (tensors(**{f"{Q}.lora_magnitude_vector": torch.ones(2)}), "is DoRA"),
    "a bias": (tensors(**{f"{Q}.base_layer.bias": torch.ones(2)}), "bias of the adapter's own"),
}  # fmt: skip


def serve(llm: LLM, adapter: Path) -> list[int]:
    (output,) = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False, lora_request=request_for(adapter))
    if output.error is not None:
        raise output.error
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_is_refused_and_the_engine_goes_on(
    case: str, llm: LLM, adapter: Path
) -> None:
    before = serve(llm, adapter)
    spoil, message = BROKEN[case]
    spoil(adapter)
    with pytest.raises(ValueError, match=message):
        serve(llm, adapter)
    config = llm.engine.config, llm.engine.model_config
    with pytest.raises(ValueError, match=message):  # as the server does
        check_adapter(*config, str(adapter))
    (output,) = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    assert output.error is None and list(output.outputs[0].token_ids) != before
    assert not llm.engine.has_unfinished_requests()


NAMES = {
    "model.layers.9.self_attn.q_proj": "layers.9.self_attn.q_proj is not a linear layer",
    "model.layers.0.self_attn.w": "self_attn.w is not a linear layer",
    "model.embed_tokens": "an adapted embedding",
    "lm_head": "an adapted LM head",
    "model.layers.0.mlp.experts.0.up_proj": "adapted experts",
}


@pytest.mark.parametrize("module", NAMES)
def test_unknown_modules_are_named(module: str, llm: LLM, tmp_path: Path) -> None:
    parts = {f"{module}.lora_A": torch.ones(4, 48), f"{module}.lora_B": torch.ones(64, 4)}
    write_files(tmp_path, parts, {"r": 4})
    with pytest.raises(ValueError, match=NAMES[module]):
        serve(llm, tmp_path)


def test_the_same_matrix_twice(llm: LLM, tmp_path: Path) -> None:
    """With and without the prefix of the base model, these are one layer."""
    pair = (torch.ones(4, 48), torch.ones(64, 4))
    names = ["model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj"]
    parts = {f"{n}.lora_{k}": x for n in names for k, x in zip("AB", pair, strict=True)}
    write_files(tmp_path, {name: x.clone() for name, x in parts.items()}, {"r": 4})
    with pytest.raises(ValueError, match="q_proj 2 times"):
        serve(llm, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1, "x"), "lora_name=''"),
        ((5, 1, "x"), "lora_name=5"),
        (("a", 0, "x"), "lora_int_id=0"),
        (("a", 1, ""), "lora_path=''"),
        (("a", 1, "a\0b"), "lora_path="),
        (("a", 1, None), "lora_path=None"),
    ],
    ids=str,
)
def test_requests_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(*arguments)


def test_a_folder_that_is_none(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder; download an adapter first"):
        serve(llm, tmp_path / "nowhere")


def test_adapters_need_the_option(model: tuple[Path, Any], adapter: Path) -> None:
    with LLM(str(model[0]), num_kv_blocks=64, skip_tokenizer_init=True) as plain:
        with pytest.raises(ValueError, match="enable_lora=True"):
            plain.generate([[1]], PARAMS, use_tqdm=False, lora_request=request_for(adapter))
        with pytest.raises(ValueError, match="must be LoRARequest"):
            plain.generate([[1]], PARAMS, use_tqdm=False, lora_request="adapter")
    for options, message in (
        ({"max_loras": 2}, "max_loras=2 needs enable_lora=True"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "at least max_loras=4"),
        ({"enable_lora": True, "distributed_executor_backend": "ray",
          "tensor_parallel_size": 2}, "one machine"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            LLM(str(model[0]), num_kv_blocks=64, skip_tokenizer_init=True, **options)


def test_links_may_not_lead_out_of_the_root(adapter: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = root / "inside"
    inside.mkdir(parents=True)
    for name in (CONFIG, TENSORS):
        (inside / name).symlink_to(adapter / name)
    with pytest.raises(ValueError, match="is not inside of"):
        AdapterFiles.find(str(inside), str(root))
    with pytest.raises(ValueError, match="is not inside of"):
        AdapterFiles.find(str(root / ".." / "adapter"), str(root))
    (root / "link").symlink_to(adapter)
    with pytest.raises(ValueError, match="is not inside of"):
        AdapterFiles.find(str(root / "link"), str(root))
    assert AdapterFiles.find(str(inside)).folder == str(inside)  # the engine's own user may


def test_json_of_the_config_is_what_peft_writes(adapter: Path) -> None:
    """Entries without effect are accepted at any value, others only if they are empty."""
    file = adapter / CONFIG
    entries = json.loads(file.read_text()) | {"megatron_config": None, "inference_mode": True}
    file.write_text(json.dumps(entries | {"lora_dropout": 0.1, "target_modules": "all-linear"}))
    assert AdapterFiles.find(str(adapter)).config == file


def test_an_adapter_in_memory_does_not_change_with_its_file(llm: LLM, adapter: Path) -> None:
    """In a file that is mapped into memory it would be seen, and a shorter file a crash."""
    limits = limits_of(llm.engine.config, llm.engine.model_config)._replace(dtype=torch.float32)
    found = read_adapter(outline_of(AdapterFiles.find(str(adapter)), limits), limits)
    before = {name: tuple(x.clone() for x in pair) for name, pair in found.weights.items()}
    file = adapter / TENSORS
    with file.open("r+b") as written:
        written.seek(-(file.stat().st_size // 2), os.SEEK_END)
        written.write(b"\1" * (file.stat().st_size // 2))
    for name, pair in found.weights.items():
        assert all(map(torch.equal, pair, before[name])), name


@pytest.mark.parametrize("size", ["shorter", "longer"])
@pytest.mark.parametrize("moment", ["before it is read", "while it is read"])
def test_a_file_that_another_program_overwrites_is_an_error(
    moment: str, size: str, llm: LLM, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cp` does, which first shortens it. A request with its old size gets no other tensors."""
    limits = limits_of(llm.engine.config, llm.engine.model_config)._replace(dtype=torch.float32)
    outline, file = outline_of(AdapterFiles.find(str(adapter)), limits), adapter / TENSORS
    num_bytes = 100 if size == "shorter" else 10 * file.stat().st_size
    if moment == "before it is read":
        os.truncate(file, num_bytes)
    else:
        find = AdapterFiles.find

        def find_later(path: str) -> AdapterFiles:
            os.truncate(file, num_bytes)
            return find(path)

        monkeypatch.setattr(AdapterFiles, "find", find_later)
    with pytest.raises(ValueError, match="has changed while it was read: load it again"):
        read_adapter(outline, limits)


IS_OVERWRITTEN = """
import sys, threading, time
from pathlib import Path
from nanoserve.features.lora.stored_header import tensors_of
file, end = Path(sys.argv[1]), time.monotonic() + float(sys.argv[2])
content, found = file.read_bytes(), {True: 0, False: 0}
def overwrite():
    while time.monotonic() < end:
        file.write_bytes(content)
threading.Thread(target=overwrite).start()
while time.monotonic() < end:
    try:
        found[len([*tensors_of(file)]) > 0] += 1
    except ValueError:
        found[False] += 1
assert min(found.values()) > 0, found
"""


@pytest.mark.size("full")
def test_a_header_is_read_while_another_program_overwrites_the_file(adapter: Path) -> None:
    """The library, which maps the file, ends the process within seconds."""
    command = [sys.executable, "-c", IS_OVERWRITTEN, str(adapter / TENSORS), "5"]
    subprocess.run(command, check=True)


def test_targets_of_a_fused_module_share_no_memory(tmp_path: Path) -> None:
    """Else safetensors does not save them, for other ranks: the file has one A for q, k and v."""
    part = "model.layers.0.self_attn."
    shapes = {f"{part}q_proj": (64, 32), f"{part}k_proj": (32, 32), f"{part}v_proj": (32, 32)}
    tensors = {"lora_A": torch.randn(4, 32), "lora_B": torch.randn(128, 4)}
    named = {f"{part}qkv_proj.{name}": tensor for name, tensor in tensors.items()}
    write_files(tmp_path, named, {"peft_type": "LORA", "r": 4, "lora_alpha": 4})
    limits = Limits(shapes, 16, torch.float32)
    found = read_adapter(outline_of(AdapterFiles.find(str(tmp_path)), limits), limits)
    assert found.weights.keys() == shapes.keys()
    save_file(named_tensors(found.weights), tmp_path / "saved.safetensors")


def test_many_patterns_take_no_time() -> None:
    patterns = {f"layers.{index}.mlp.down_proj": 4 for index in range(2000)}
    content = json.dumps({"rank_pattern": patterns, "alpha_pattern": patterns}).encode()
    read = AdapterConfig.of(content, "here")
    began = time.process_time()
    modules = [f"model.layers.{index}.mlp.up_proj" for index in range(200)]
    assert {(read.rank_of(module), read.scaling_of(module)) for module in modules} == {(8, 1)}
    assert read.rank_of("model.layers.1999.mlp.down_proj") == 4
    assert time.process_time() - began < 8  # a second, or a minute if each is compiled again
    with pytest.raises(ValueError, match="rank_pattern"):
        AdapterConfig.of(json.dumps({"rank_pattern": patterns | {"x": 4}}).encode(), "here")


def test_an_adapter_is_checked_once_for_many_prompts(
    llm: LLM, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = [], store.outline_of

    def counted(*args: Any) -> Any:
        checked.append(args)
        return check(*args)

    monkeypatch.setattr(store, "outline_of", counted)
    prompts = [[1, 2, 3]] * 20
    llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=request_for(adapter))
    assert len(checked) == 2  # as the prompts are checked, and as it is added


def test_files_that_keep_their_size_and_time_are_others_nevertheless(adapter: Path) -> None:
    """As `cp --preserve` writes them."""
    file, before = adapter / TENSORS, AdapterFiles.find(str(adapter))
    found = file.stat()
    with file.open("r+b") as written:
        written.seek(-4, os.SEEK_END)
        written.write(b"\1\2\3\4")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = AdapterFiles.find(str(adapter))
    assert file.stat().st_mtime_ns == found.st_mtime_ns and after != before
