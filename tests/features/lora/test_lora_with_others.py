"""Adapters together with other features: each request gets the tokens of its own merged model."""

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lora_models import ALL, ATTENTION, MLP, greedy, request_for, write_adapter
from tiny_checkpoints import make_qwen3
from torch import nn

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.features.lora.extension import LoRAAdapters
from nanoserve.worker.model_runner import ModelRunner

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    **{"dtype": "float32", "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 3},
    **{"max_lora_rank": 8, "max_cpu_loras": 4, "block_size": 4, "num_kv_blocks": 200},
    **{"max_num_seqs": 16, "max_model_len": 80, "attention_backend": "torch"},
}


class Served(NamedTuple):
    """A base and its adapters: by request its adapter, its prompt and its tokens."""

    base: Path
    adapters: list[LoRARequest]
    requests: list[LoRARequest | None]
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    base = tmp_path_factory.mktemp("base")
    models: list[nn.Module] = [make_qwen3(base).eval()]
    adapters = []
    for index, targets in enumerate((ALL, ATTENTION, MLP, ("q_proj", "v_proj", "down_proj"))):
        folder = tmp_path_factory.mktemp(f"adapter{index}")
        rank = (8, 4, 3, 1)[index]
        models.append(write_adapter(models[0], folder, index, targets, rank, size=0.15))
        adapters.append(request_for(folder, f"adapter{index}", index + 1))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 300, 21).tolist()  # all adapters see the same prefix
    requests, prompts, tokens = [], [], []
    for length in (1, 21, 6):
        for model, adapter in zip(models, (None, *adapters), strict=True):
            own = rng.integers(0, 300, length).tolist()
            prompts.append(shared if length == 21 else shared[:length] + own)
            requests.append(adapter)
            tokens.append(greedy(model, prompts[-1], NUM_TOKENS))
    assert len({tuple(one) for one in tokens[5:10]}) == 5  # adapters matter
    return Served(base, adapters, requests, prompts, tokens)


def serve(llm: LLM, served: Served, params: SamplingParams = PARAMS) -> list[list[int]]:
    outputs = llm.generate(served.prompts, params, use_tqdm=False, lora_request=served.requests)
    assert [output.error for output in outputs] == [None] * len(outputs)
    check_idle(llm)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_idle(llm: LLM) -> None:
    """Nothing is left of requests that have ended."""
    assert not llm.engine.has_unfinished_requests()
    llm.engine.scheduler.check()
    (own,) = [each for each in llm.engine.extensions if isinstance(each, LoRAAdapters)]
    own.on_step_start()
    assert own.num_unfinished == 0


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "numba": {"attention_backend": "numba"},
    "async": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 16},
    "no cache": {"enable_prefix_caching": False},
    "a tiny pool": {"num_kv_blocks": 22},
    "a tiny pool, ahead": {"num_kv_blocks": 22, "async_scheduling": True},
    "one place": {"max_loras": 1, "max_cpu_loras": 1},
    "n-grams": {"speculative_config": DRAFTS},
    "n-grams, ahead": {"speculative_config": DRAFTS, "async_scheduling": True, "max_loras": 2},
    "invariant": {"attention_backend": "numba", "batch_invariant": True},
    "priorities": {"scheduling_policy": "priority"},
    "host": {"kv_offloading_size": 0.001, "num_kv_blocks": 24},
    "disk": {"kv_offloading_path": "blocks", "num_kv_blocks": 24},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
EXACT = [name for name in OTHERS if name != "int8 cache"]


@pytest.mark.small(name=["alone", "a tiny pool, ahead", "n-grams, ahead", "disk", "one place"])
@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_those_of_merged_models(
    name: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "numba" in OTHERS[name].values():
        pytest.importorskip("numba")
    with LLM(str(served.base), **OPTIONS | OTHERS[name]) as llm:
        assert serve(llm, served) == served.tokens
        assert serve(llm, served) == served.tokens  # with cached prefixes
        if "n-grams" in name:
            assert llm.stats.num_draft_tokens > 0
        if "tiny" in name:
            assert llm.stats.num_preemptions > 0


RANKS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "max_loras": 1, "max_cpu_loras": 1, "async_scheduling": True},
]


@pytest.mark.small(options=RANKS[:1])
@pytest.mark.parametrize("options", RANKS, ids=str)
def test_ranks(options: dict[str, Any], served: Served) -> None:
    with LLM(str(served.base), **OPTIONS | options) as llm:
        assert serve(llm, served) == served.tokens
        assert serve(llm, served) == served.tokens


@pytest.mark.small(bits=["int4"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_base_of_fewer_bits(bits: str, served: Served, tmp_path: Path) -> None:
    """A request gets what it gets alone; adapters are not quantized."""
    pytest.importorskip("numba")
    model = make_qwen3(tmp_path, hidden_size=64, intermediate_size=96)
    requests: list[LoRARequest | None] = [None]
    for seed in range(3):
        write_adapter(model, tmp_path / f"a{seed}", seed, ALL, 8, size=0.15)
        requests.append(request_for(tmp_path / f"a{seed}"))
    prompts = [served.prompts[5]] * 4
    options = OPTIONS | {"quantization": bits, "enable_prefix_caching": False}
    with LLM(str(tmp_path), **options) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
        together = [list(output.outputs[0].token_ids) for output in outputs]
        for prompt, adapter, tokens in zip(prompts, requests, together, strict=True):
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=adapter)
            assert list(output.outputs[0].token_ids) == tokens
        check_idle(llm)
    assert len({tuple(tokens) for tokens in together}) == 4


@pytest.mark.size("full")
def test_a_draft_model(served: Served) -> None:
    """The draft model has no adapters: its tokens are accepted less often, and nothing else."""
    draft = DRAFTS | {"method": "draft_model", "model": str(served.base)}
    with LLM(str(served.base), **OPTIONS, speculative_config=draft) as llm:
        assert serve(llm, served) == served.tokens
        assert llm.stats.num_draft_tokens > llm.stats.num_accepted_tokens > 0


def test_several_completions_of_a_prompt(served: Served) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=6, ignore_eos=True)
    with LLM(str(served.base), **OPTIONS) as llm:
        outputs = llm.generate(
            served.prompts[5:10], params, use_tqdm=False, lora_request=served.requests[5:10]
        )
        for output, adapter in zip(outputs, served.requests[5:10], strict=True):
            assert len({tuple(one.token_ids) for one in output.outputs}) == 3
            (again,) = llm.generate(
                [output.prompt_token_ids], params, use_tqdm=False, lora_request=adapter
            )
            assert [one.token_ids for one in again.outputs] == [
                one.token_ids for one in output.outputs
            ]
        check_idle(llm)


def test_structured_output(served: Served) -> None:
    """A request waits for its grammar and for its adapter, whichever takes longer."""
    pytest.importorskip("llguidance")
    from nanoserve import StructuredOutputsParams

    limit = StructuredOutputsParams(regex="[ab]{4}")
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=limit)
    options = {**OPTIONS, "skip_tokenizer_init": False, "max_model_len": 200}
    answers = {}
    with LLM("tiny-qwen3", **options | {"num_kv_blocks": 400}) as llm:
        model = _tiny_model(llm)
        for seed in range(3):
            folder = served.base.parent / f"tiny{seed}"
            write_adapter(model, folder, seed, ALL, 4, size=0.3)
            (output,) = llm.generate(
                ["a b"], params, use_tqdm=False, lora_request=request_for(folder)
            )
            assert output.error is None
            answers[seed] = output.outputs[0].text
            assert set(answers[seed]) <= {"a", "b"} and len(answers[seed]) == 4
        check_idle(llm)


def _tiny_model(llm: LLM) -> nn.Module:
    from transformers import AutoModelForCausalLM

    executor: Any = llm.engine.executor
    return AutoModelForCausalLM.from_pretrained(executor.path, dtype=torch.float32)


def test_pooling(served: Served) -> None:
    from pooling_models import hidden_states, normalized

    options = OPTIONS | {"runner": "pooling"}
    with LLM(str(served.base), **options) as llm:
        prompts, requests = served.prompts[5:10], served.requests[5:10]
        outputs = llm.embed(prompts, use_tqdm=False, lora_request=requests)
        check_idle(llm)
    found = np.array([output.outputs.embedding for output in outputs])
    base = make_qwen3(served.base / "again").eval()
    plain = normalized(hidden_states(base, prompts[0])[-1])
    assert np.abs(found[0] - plain).max() < 1e-5
    for index, request in enumerate(requests[1:], 1):
        assert request is not None
        merged = write_adapter(
            base, served.base / "again" / f"a{index}", index - 1,
            (ALL, ATTENTION, MLP, ("q_proj", "v_proj", "down_proj"))[index - 1],
            (8, 4, 3, 1)[index - 1], size=0.15,
        )  # fmt: skip
        expected = normalized(hidden_states(merged, prompts[index])[-1])
        assert np.abs(found[index] - expected).max() < 1e-5


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level: int, served: Served) -> None:
    with LLM(str(served.base), **OPTIONS) as llm:
        assert serve(llm, served) == served.tokens
        llm.sleep(level)
        llm.wake_up()
        assert serve(llm, served) == served.tokens


@pytest.mark.size("full")
def test_ranks_sleep(served: Served) -> None:
    with LLM(str(served.base), **OPTIONS, tensor_parallel_size=2) as llm:
        assert serve(llm, served) == served.tokens
        llm.sleep(2)
        llm.wake_up()
        assert serve(llm, served) == served.tokens


def test_other_weights(served: Served, tmp_path: Path) -> None:
    """Adapters stay, and are added to the new weights."""
    other = make_qwen3(tmp_path / "other", seed=5).eval()
    merged = write_adapter(other, tmp_path / "adapter", 0, ALL, 8, size=0.15)
    with LLM(str(served.base), **OPTIONS) as llm:
        assert serve(llm, served) == served.tokens
        llm.update_weights(tmp_path / "other")
        requests = [None, served.adapters[0]]
        prompts = [served.prompts[5]] * 2
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [greedy(model, prompts[0], NUM_TOKENS) for model in (other, merged)]


def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_any(served: Served) -> None:
    prompts = served.prompts
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
    # All tokens are computed in steps of the same rows, whatever has been cached.
    options = OPTIONS | {"enable_prefix_caching": False}
    plain = {name: value for name, value in options.items() if "lora" not in name}
    with LLM(str(served.base), **plain) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    mixed: list[LoRARequest | None] = [None] * len(prompts)
    mixed[1::3] = served.adapters[:1] * len(mixed[1::3])
    mixed[2::3] = served.adapters[1:2] * len(mixed[2::3])
    with LLM(str(served.base), **options) as llm:
        llm.generate([[1], [1]], params, use_tqdm=False, lora_request=served.adapters[:2])
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=mixed)
        alone = llm.generate(prompts, params, use_tqdm=False)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        is_same = one.outputs[0].logprobs == other.outputs[0].logprobs
        assert is_same == (mixed[index] is None), index
    for one, other in zip(expected, alone, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_an_adapter_that_is_replaced_under_its_name(served: Served, tmp_path: Path) -> None:
    """Another file is another adapter, whatever its name; equal files share cached prefixes."""
    model, folder = make_qwen3(tmp_path / "base").eval(), tmp_path / "adapter"
    prompt, found = served.prompts[5], []
    with LLM(str(served.base), **OPTIONS) as llm:
        for seed in (1, 2, 1):
            merged = write_adapter(model, folder, seed, ALL, 8, size=0.15)
            queries, hits = llm.stats.prefix_cache_queries, llm.stats.prefix_cache_hits
            (output,) = llm.generate(
                [prompt], PARAMS, use_tqdm=False, lora_request=request_for(folder)
            )
            found.append(list(output.outputs[0].token_ids))
            assert found[-1] == greedy(merged, prompt, NUM_TOKENS)
            assert llm.stats.prefix_cache_queries > queries
            # The third adapter has the content of the first one, so its prefixes are there.
            assert (llm.stats.prefix_cache_hits > hits) == (len(found) == 3)
    assert found[0] == found[2] != found[1]


def test_aborts_while_an_adapter_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_reads(monkeypatch, 0.1)
    with LLM(str(served.base), **OPTIONS) as llm:
        engine = llm.engine
        for index, adapter in enumerate(served.adapters):
            engine.add_request(str(index), served.prompts[5], PARAMS, lora_request=adapter)
        engine.add_request("base", served.prompts[5], PARAMS)
        engine.step()
        engine.abort_request("0")
        engine.abort_request("3")
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {one.request_id: one for one in engine.step() if one.finished}
        found = {name: list(one.outputs[0].token_ids) for name, one in outputs.items()}
        assert {name: found.get(name) for name in ("base", "1", "2")} == {
            "base": served.tokens[5], "1": served.tokens[7], "2": served.tokens[8]
        }  # fmt: skip
        check_idle(llm)


def test_others_run_while_an_adapter_is_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_reads(monkeypatch, 0.5)
    with LLM(str(served.base), **OPTIONS) as llm:
        engine = llm.engine
        engine.add_request("slow", served.prompts[5], PARAMS, lora_request=served.adapters[0])
        engine.add_request("base", served.prompts[5], PARAMS)
        order = []
        while engine.has_unfinished_requests():
            order += [one.request_id for one in engine.step() if one.finished]
        assert order == ["base", "slow"]


def test_an_adapter_that_takes_too_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_reads(monkeypatch, 1.0)
    monkeypatch.setattr("nanoserve.features.lora.extension._TIME_LIMIT", 0.1)
    with LLM(str(served.base), **OPTIONS) as llm:
        (output,) = llm.generate([[1]], PARAMS, use_tqdm=False, lora_request=served.adapters[0])
        assert output.outputs[0].finish_reason == "error"
        assert "not read within 0.1 seconds" in str(output.error)
        check_idle(llm)


def test_a_step_that_fails_loads_its_adapters_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = ModelRunner.forward, []

    def fail_at_times(self: ModelRunner, batch: Any, inputs: Any) -> Any:
        calls.append(inputs)
        if len(calls) % 5 == 3:
            raise RuntimeError("planted")
        return forward(self, batch, inputs)

    with LLM(str(served.base), **OPTIONS) as llm:
        monkeypatch.setattr(ModelRunner, "forward", fail_at_times)
        engine = llm.engine
        for index, (prompt, adapter) in enumerate(
            zip(served.prompts, served.requests, strict=True)
        ):
            engine.add_request(str(index), prompt, PARAMS, lora_request=adapter)
        found = {}
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except RuntimeError:
                continue
            found |= {
                int(o.request_id): list(o.outputs[0].token_ids) for o in outputs if o.finished
            }
        check_idle(llm)
    assert [found[index] for index in range(len(served.tokens))] == served.tokens


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    from nanoserve.features.lora import store

    read = store.read_adapter

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return read(*args)

    monkeypatch.setattr(store, "read_adapter", slowly)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoRARequest]]:
    """A tiny base with 200 adapters."""
    base = tmp_path_factory.mktemp("many")
    model = make_qwen3(base, num_hidden_layers=1)
    folders = [base / f"adapter{index}" for index in range(200)]
    for seed, folder in enumerate(folders):
        write_adapter(model, folder, seed, ("q_proj", "up_proj"), 2, size=0.5)
    return base, [request_for(folder, folder.name) for folder in folders]


def test_many_requests_over_many_adapters_in_eight_places(
    many: tuple[Path, list[LoRARequest]], full_size: bool
) -> None:
    """Nothing leaks, nobody starves, aborts included; equal requests get equal answers."""
    base, adapters = many
    rng, total = random.Random(0), 10_000 if full_size else 400
    adapters = adapters if full_size else adapters[:24]
    options = OPTIONS | {"max_loras": 8, "max_cpu_loras": 16, "num_kv_blocks": 120}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    answers: dict[int, list[int]] = {}
    with LLM(str(base), **options) as llm:
        engine, added, ended, step = llm.engine, 0, 0, 0
        began: dict[str, int] = {}
        waits = []
        chosen: dict[str, int] = {}
        while ended < total:
            while added < total and len(began) < 40:
                index = rng.randrange(6) if rng.random() < 0.7 else rng.randrange(len(adapters))
                name = str(added)
                engine.add_request(name, [7, 8, 9, 7], params, lora_request=adapters[index])
                chosen[name], began[name], added = index, step, added + 1
                if rng.random() < 0.05:  # of requests: a slow machine has more steps
                    aborted = rng.choice([*began])
                    engine.abort_request(aborted)
                    ended += began.pop(aborted, None) is not None
            step += 1
            for output in engine.step():
                if output.finished and output.request_id in began:
                    assert output.error is None
                    waits.append(step - began.pop(output.request_id))
                    tokens = list(output.outputs[0].token_ids)
                    index = chosen[output.request_id]
                    assert answers.setdefault(index, tokens) == tokens
                    ended += 1
        check_idle(llm)
        (own,) = [each for each in engine.extensions if isinstance(each, LoRAAdapters)]
        assert own.num_adapters <= 16
    # An adapter with few requests may have had all of them aborted.
    assert len(answers) > 0.9 * len(adapters) and max(waits) < 400, (len(answers), max(waits))
    assert len({tuple(tokens) for tokens in answers.values()}) > len(answers) / 2
