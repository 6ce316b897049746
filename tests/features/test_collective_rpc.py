"""Functions that `LLM.collective_rpc` calls between two steps, and the two that are built in."""

import asyncio
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_functions
from safetensors.torch import load_file
from tiny_checkpoints import make_checkpoint, make_qwen3
from transformers import Qwen3MoeForCausalLM

from nanoserve import LLM, AsyncLLM, SamplingParams, register_worker_function
from nanoserve.worker.worker_functions import WORKER_FUNCTIONS

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 30, "block_size": 4}
LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORKER_FUNCTIONS, "_entries", WORKER_FUNCTIONS.entries())
    # Other processes import them, too.
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_functions.__file__).parent), os.pathsep)
    for name in ("describe", "sum_over_ranks", "fail", "wait", "model"):
        register_worker_function(name, f"toy_functions:{name}")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


def test_arguments_and_results_are_json(llm: LLM) -> None:
    assert llm.collective_rpc("describe") == [[0, [], {}]]
    args, kwargs = ((1, 2), "a"), {"key": {3: None}}
    assert llm.collective_rpc("describe", 60, args, kwargs) == [
        [0, [[1, 2], "a"], {"key": {"3": None}}]
    ]
    assert llm.collective_rpc("sum_over_ranks", args=[1.5]) == [1.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": toy_functions.describe}, "method=.* must be the name of a registered function"),
        ({"method": "describes"}, r"one of \['weights_checksum', 'memory_stats', 'describe', .*"),
        ({"method": "describes"}, r'register_worker_function\("name", "package.module:function"\)'),
        ({"timeout": 0}, "timeout=0 must be a number, finite and > 0"),
        ({"timeout": math.inf}, "timeout=inf must be a number"),
        ({"timeout": "60"}, "timeout='60' must be a number"),
        ({"args": "ab"}, "args='ab' must be a list or a tuple"),
        ({"args": [{1, 2}]}, "must be serializable as JSON .*pass the path of a file"),
        ({"kwargs": [1]}, r"kwargs=\[1\] must be a dictionary"),
        ({"kwargs": {1: 2}}, r"kwargs=\{1: 2\} must be a dictionary with strings as keys"),
    ],
)
def test_bad_arguments_are_rejected(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.collective_rpc(**{"method": "describe", **arguments})


def test_a_function_is_registered_by_its_location() -> None:
    for location in (toy_functions.describe, "__main__:describe", 5):
        with pytest.raises(ValueError, match=r"'package\.module:function' of a module that"):
            register_worker_function("mine", location)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="already registered with another entry"):
        register_worker_function("describe", "toy_functions:wait")
    with pytest.raises(ValueError, match="must be a class or"):
        register_worker_function("mine", "toy_functions")


def test_a_failure_is_reported_and_the_engine_goes_on(llm: LLM) -> None:
    register_worker_function("absent", "toy_functions:absent")
    for method, args, message in [
        ("fail", [0], "'fail' has failed:\nrank 0: .*LookupError: no such thing on this rank"),
        ("fail", [], "rank 0: .*TypeError"),
        ("absent", [], "rank 0: .*AttributeError"),
        ("model", [], "rank 0: .*not JSON serializable"),
    ]:
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            llm.collective_rpc(method, args=args)
    with pytest.raises(TimeoutError, match=r"'wait', timeout=0\.01: all ranks have returned too"):
        llm.collective_rpc("wait", 0.01, (0, 0.05))
    assert llm.collective_rpc("wait", 60, (0, 0.0)) == [0]
    assert llm.generate([[1, 2]], LONG, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_it_is_called_between_two_steps(llm: LLM) -> None:
    plain = llm.generate([[5, 6, 7]], LONG, use_tqdm=False)[0].outputs[0].token_ids
    llm.engine.add_request("0", [5, 6, 7], LONG)
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
        assert llm.collective_rpc("describe", args=[1]) == [[0, [1], {}]]
    assert outputs[0].outputs[0].token_ids == plain

    def call_inside(*arguments: object) -> None:
        llm.collective_rpc("describe")

    llm.engine.add_request("1", [5, 6, 7], LONG)
    llm.engine.observers.append(call_inside)
    try:
        with pytest.raises(RuntimeError, match="inside a step"):
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
    finally:
        llm.engine.observers.remove(call_inside)
        llm.engine.abort_request("1")


def test_memory_is_counted_awake_and_asleep(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    num_bytes = sum(tensor.numel() * 4 for tensor in weights.values())
    with LLM(checkpoint, dtype="float32", attention_backend="torch", **OPTIONS) as llm:
        block_bytes = llm.engine.executor.kv_cache_layout.block_bytes
        awake = {"weights_bytes": num_bytes, "kv_cache_bytes": 31 * block_bytes}
        assert llm.collective_rpc("memory_stats") == [awake]
        checksum = llm.collective_rpc("weights_checksum")
        llm.sleep(level=2)
        assert llm.collective_rpc("memory_stats") == [{"weights_bytes": 0, "kv_cache_bytes": 0}]
        with pytest.raises(RuntimeError, match="the weights are asleep"):
            llm.collective_rpc("weights_checksum")
        llm.wake_up(["weights"])
        assert llm.collective_rpc("weights_checksum") == checksum
        assert llm.collective_rpc("memory_stats") == [awake | {"kv_cache_bytes": 0}]
    with pytest.raises(ValueError, match="this engine is closed"):
        llm.collective_rpc("memory_stats")


@pytest.mark.small(options=[{"dtype": "float32"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "attention_backend": "torch"},
        {"quantization": "int8"},
        {"moe": True},
        {"moe": True, "quantization": "int8"},
    ],
    ids=str,
)
def test_the_checksum_depends_on_each_tensor(
    options: dict[str, Any], tmp_path: Path, full_size: bool
) -> None:
    options = OPTIONS | options
    if options.pop("moe", False):
        make_checkpoint(Qwen3MoeForCausalLM, tmp_path / "first", 1, **MOE)
    else:
        make_qwen3(tmp_path / "first", 1)
    weights = load_file(tmp_path / "first" / "model.safetensors")
    with LLM(tmp_path / "first", **options) as llm:
        (first,) = llm.collective_rpc("weights_checksum")
        seen = {first}
        names = list(weights) if full_size else list(weights)[::4]
        for name in names:
            llm.update_weights(weights | {name: weights[name] * 1.5})
            seen |= {*llm.collective_rpc("weights_checksum")}
        assert len(seen) == 1 + len(names)
        llm.update_weights(weights)
        assert llm.collective_rpc("weights_checksum") == [first]
    with LLM(tmp_path / "first", **options) as llm:
        assert llm.collective_rpc("weights_checksum") == [first]


@pytest.mark.small(engine_process=[False])
@pytest.mark.parametrize("engine_process", [False, True])
def test_an_event_loop_calls_it_too(engine_process: bool, checkpoint: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(checkpoint, engine_process=engine_process, **OPTIONS) as llm:
            assert await llm.collective_rpc("describe", args=(1,)) == [[0, [1], {}]]
            register_worker_function("later", "toy_functions:describe")
            assert await llm.collective_rpc("later", kwargs={"a": 1}) == [[0, [], {"a": 1}]]
            with pytest.raises(RuntimeError, match="no such thing on this rank"):
                await llm.collective_rpc("fail", args=[0])
            with pytest.raises(TimeoutError):
                await llm.collective_rpc("wait", 0.01, (0, 0.05))
            with pytest.raises(ValueError, match="one of"):
                await llm.collective_rpc("unknown")
            assert len((await llm.collective_rpc("weights_checksum"))[0]) == 64

    asyncio.run(run())
