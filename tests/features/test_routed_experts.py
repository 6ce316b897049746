"""`enable_return_routed_experts`: the experts of each token are those of transformers' router."""

import asyncio
import base64
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from mixed_attention import MixedTorchAttention
from model_fuzz import VOCAB_SIZE, ModelRun, reference_engine
from tiny_checkpoints import make_checkpoint, make_qwen3
from transformers import MixtralForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.routed_experts import prepare_routed_experts
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.routed_experts import RoutedExperts
from nanoserve.models.mixtral import MixtralForCausalLM as OurMixtral
from nanoserve.models.mixtral import MixtralMoE
from nanoserve.models.registry import MODELS
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
Model = tuple[type[PreTrainedModel], dict[str, Any]]
MODELS_WITH_EXPERTS: dict[str, Model] = {
    "qwen3-moe": (Qwen3MoeForCausalLM, QWEN),
    "some layers dense": (
        Qwen3MoeForCausalLM,
        QWEN | {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "mixtral": (MixtralForCausalLM, MIXTRAL),
    "more than 256 experts": (Qwen3MoeForCausalLM, QWEN | {"num_experts": 300}),
}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


class Routers:
    """The experts that transformers' own routers choose, given all tokens at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._chosen = model, {}
        for layer, decoder in enumerate(model.model.layers):
            for name, module in decoder.named_modules():
                if name.endswith(".gate"):
                    module.register_forward_hook(self._note(layer))

    def _note(self, layer: int) -> Callable[..., None]:
        def note(module: Any, inputs: Any, output: Any) -> None:
            self._chosen[layer] = output[2].reshape(-1, output[2].shape[-1]).numpy()

        return note

    @torch.inference_mode()
    def __call__(self, token_ids: list[int]) -> np.ndarray:
        """Return [num_tokens, num_layers, top_k], zeros in dense layers."""
        self._chosen.clear()
        self._model(torch.tensor([token_ids]))
        any_layer = next(iter(self._chosen.values()))
        shape = (len(token_ids), len(self._model.model.layers), any_layer.shape[1])
        experts = np.zeros(shape, dtype=np.int64)
        for layer, chosen in self._chosen.items():
            experts[:, layer] = chosen
        return experts


def check(routers: Routers, prompt: list[int], completion: CompletionOutput) -> int:
    """Compare the routes of a completion that has ended; return their number."""
    found = completion.routed_experts
    token_ids = [*prompt, *completion.token_ids]
    if completion.finish_reason == "abort" and found is None:
        return 0
    expected = routers(token_ids)
    if completion.finish_reason in ("stop", "length"):
        ends_by_token = completion.finish_reason == "stop" and not isinstance(
            completion.stop_reason, str
        )
        assert len(found) == len(token_ids) - (not ends_by_token), completion
    assert len(found) <= len(token_ids)
    np.testing.assert_array_equal(found, expected[: len(found)])
    return len(found)


def check_all(routers: Routers, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for completion in output.outputs:
            assert check(routers, output.prompt_token_ids, completion) > 0


def prompts_of(lengths: list[int], vocab_size: int = 300) -> list[list[int]]:
    """Prompts with a common beginning."""
    return [[(7 * i * i + i + (i > 20) * n) % vocab_size for i in range(n)] for n in lengths]


def make(name: str, path: Path, **more: Any) -> Routers:
    architecture, settings = MODELS_WITH_EXPERTS[name]
    return Routers(make_checkpoint(architecture, path, **(settings | more)))


def engine(path: Path, **options: Any) -> LLM:
    own: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "attention_backend": "torch",
        "block_size": 8,
        "num_kv_blocks": 64,
        "enable_return_routed_experts": True,
    }
    return LLM(path, **(own | options))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Routers]:
    path = tmp_path_factory.mktemp("experts")
    return path, make("qwen3-moe", path)


# ---------------------------------------------------------------- what is returned


@pytest.mark.small(name=["some layers dense", "mixtral"])
@pytest.mark.parametrize("name", MODELS_WITH_EXPERTS)
def test_they_are_the_experts_of_transformers(name: str, tmp_path: Path) -> None:
    routers = make(name, tmp_path)
    with engine(tmp_path, max_num_seqs=3, max_num_batched_tokens=20) as llm:
        prompts = prompts_of([45, 3, 1, 30, 45])
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        check_all(routers, outputs)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.stats.prefix_cache_hits > 60
        check_all(routers, again)
    found = outputs[0].outputs[0].routed_experts
    assert found.dtype == (np.int32 if name == "more than 256 experts" else np.uint8)


def test_a_stop_token_is_the_last_token_without_a_route(moe: tuple[Path, Routers]) -> None:
    """`token_ids` ends before it, so that all of these tokens have been computed."""
    path, routers = moe
    (prompt,) = prompts_of([10])
    with engine(path) as llm:
        (whole,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        stop = whole.outputs[0].token_ids[5]
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
        (ended,) = llm.generate([prompt], params, use_tqdm=False)
    (completion,) = ended.outputs
    assert completion.finish_reason == "stop"
    assert check(routers, prompt, completion) == 10 + len(completion.token_ids)
    assert check(routers, prompt, whole.outputs[0]) == 10 + 12 - 1


def test_a_stream_has_them_at_the_end_of_each_completion(moe: tuple[Path, Routers]) -> None:
    path, routers = moe
    (prompt,) = prompts_of([20])
    params = SamplingParams(n=3, temperature=2.0, seed=3, max_tokens=9, stop_token_ids=[*range(40)])
    last: dict[int, CompletionOutput] = {}
    token_ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with engine(path) as llm:
        for output in llm.stream(prompt, params):
            for new in output.outputs:
                assert (new.routed_experts is None) == (new.finish_reason is None)
                token_ids[new.index] += new.token_ids
                last[new.index] = new
    for index, completion in last.items():
        completion.token_ids = token_ids[index]
        check(routers, prompt, completion)


def test_an_aborted_request_has_those_of_the_tokens_computed_so_far(
    moe: tuple[Path, Routers],
) -> None:
    path, routers = moe
    (prompt,) = prompts_of([50])
    with engine(path, max_num_seqs=1, max_num_batched_tokens=16) as llm:
        llm.engine.add_request("a", prompt, GREEDY)
        llm.engine.add_request("waits", prompt, GREEDY)
        llm.engine.step()
        llm.engine.step()
        in_prompt, waiting = (llm.engine.abort_request(name) for name in ("a", "waits"))
    assert check(routers, prompt, in_prompt.outputs[0]) == 32
    assert waiting.outputs[0].routed_experts is None


def test_without_the_option_nothing_is_recorded(moe: tuple[Path, Routers]) -> None:
    path, _ = moe
    with engine(path, enable_return_routed_experts=False) as llm:
        runner = llm.engine.executor
        assert not runner.heads.reads_all_tokens and not llm.engine.extensions
        assert all(layer.mlp.record is None for layer in runner.model.model.layers)
        (output,) = llm.generate(prompts_of([5]), GREEDY, use_tqdm=False)
    assert output.outputs[0].routed_experts is None


# ---------------------------------------------------------------- whatever happens to a request


@pytest.fixture(scope="module")
def random_lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Routers, LLM]]:
    path = tmp_path_factory.mktemp("lives")
    routers = make("some layers dense", path, vocab_size=VOCAB_SIZE)
    with reference_engine(path) as reference:
        yield path, routers, reference


def test_schedules_at_random(
    random_lives: tuple[Path, Routers, LLM],
    by_size: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Chunks, hits, preemptions, draft tokens, aborts, failed steps, several completions."""
    caplog.set_level(logging.CRITICAL, logger="nanoserve")  # requests are made to fail
    path, routers, reference = random_lives
    counts: Counter[str] = Counter()
    for seed in range(by_size(2, 12, 150)):
        rng = random.Random(f"routes of {seed}")
        method = rng.choice([None, "ngram", "suffix"])
        drafts = None
        if method is not None:
            drafts = {"method": method, "num_speculative_tokens": 5, "adaptive": False}
        run = ModelRun(
            seed,
            path,
            reference,
            attention_backend="torch",
            speculative_config=drafts,
            enable_return_routed_experts=True,
        )
        run.run()
        counts += run.counts
        counts["accepted"] += run.llm.stats.num_accepted_tokens
        for case in run.cases.values():
            prompt = case.prompt["prompt_token_ids"]
            for completion in case.pieces.values():
                if completion.finish_reason is not None and completion.finish_reason != "error":
                    counts["routes"] += check(routers, prompt, completion)
    print(dict(counts))
    wanted = ["routes", *by_size([], ["hit tokens", "preemptions", "accepted", "failed steps"])]
    assert all(counts[name] for name in wanted), counts


def test_a_draft_model_with_experts_does_not_overwrite_them(moe: tuple[Path, Routers]) -> None:
    path, routers = moe
    drafts = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    with engine(path, speculative_config=drafts | {"adaptive": False}) as llm:
        check_all(routers, llm.generate(prompts_of([30, 7]), GREEDY, use_tqdm=False))
        assert llm.stats.num_accepted_tokens > 6


def test_prefixes_of_old_weights_are_not_found(moe: tuple[Path, Routers], tmp_path: Path) -> None:
    path, routers = moe
    others = make("qwen3-moe", tmp_path, seed=1)
    prompts = prompts_of([40, 40])
    with engine(path) as llm:
        check_all(routers, llm.generate(prompts, GREEDY, use_tqdm=False))
        llm.sleep(level=2)
        llm.update_weights(tmp_path)  # which wakes the weights
        llm.wake_up(tags=["kv_cache"])
        check_all(others, llm.generate(prompts, GREEDY, use_tqdm=False))
        llm.update_weights(path)
        check_all(routers, llm.generate(prompts, GREEDY, use_tqdm=False))


def test_running_requests_that_are_computed_again_have_the_last_routes(
    moe: tuple[Path, Routers],
) -> None:
    path, routers = moe
    with engine(path, async_scheduling=True, max_num_batched_tokens=24, max_num_seqs=4) as llm:
        for index, prompt in enumerate(prompts_of([40, 40, 9])):
            llm.engine.add_request(str(index), prompt, GREEDY)
        outputs: list[RequestOutput] = []
        for _ in range(5):
            outputs += llm.engine.step()
        llm.engine.reset_prefix_cache(reset_running_requests=True)
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
    assert sum(output.finished for output in outputs) == 3
    check_all(routers, [output for output in outputs if output.finished])


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False, "disable_hybrid_kv_cache_manager": False},
        {"disable_hybrid_kv_cache_manager": True},
    ],
    ids=["no cache", "all blocks kept"],
)
def test_blocks_behind_a_window_have_been_read(options: dict[str, Any], tmp_path: Path) -> None:
    routers = make("mixtral", tmp_path, sliding_window=9)
    budget: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with engine(tmp_path, block_size=4, **budget, **options) as llm:
        check_all(routers, llm.generate(prompts_of([60, 60, 5]), GREEDY, use_tqdm=False))


@pytest.mark.small(capture_mixed_steps=[True])
@pytest.mark.parametrize("capture_mixed_steps", [True, False])
def test_graphs_write_to_the_same_memory(
    capture_mixed_steps: bool, moe: tuple[Path, Routers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is a CPU: a replay computes padding rows, too, and the next step follows."""
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)
    path, routers = moe
    config = EngineConfig(
        str(path),
        max_num_seqs=9,
        max_num_batched_tokens=70,
        num_kv_blocks=30,
        max_model_len=100,
        capture_mixed_steps=capture_mixed_steps,
        enable_return_routed_experts=True,
    ).for_device("cuda")
    model_config, cuda = ModelConfig.from_checkpoint(path), FakeCuda()
    routes = RoutedExperts(model_config, 70, torch.device("cpu"))
    context = LayerContext(attention=MixedTorchAttention(), routed_experts=routes)
    device = CudaDevice(config, cuda, is_capturable=True, captures_mixed_steps=True)
    runner = ModelRunner.load(config, model_config, path, context, device)
    guarded = GuardedEngine(config, model_config, runner, tokenizer=None)
    prepare_routed_experts(config, model_config).add_to(guarded)
    for index, prompt in enumerate(prompts_of([40, 5, 40, 33, 2, 1, 60])):
        guarded.add_request(str(index), prompt, GREEDY)
    outputs: list[RequestOutput] = []
    while guarded.has_unfinished_requests():
        outputs += guarded.step()
    guarded.close()
    assert any(event.startswith("replay") for event in cuda.events)
    check_all(routers, [output for output in outputs if output.finished])


# ---------------------------------------------------------------- ranks, processes, servers


@pytest.mark.size("full")
def test_ranks_choose_alike(moe: tuple[Path, Routers]) -> None:
    path, routers = moe
    with engine(path, tensor_parallel_size=2, max_num_batched_tokens=24, max_num_seqs=4) as llm:
        check_all(routers, llm.generate(prompts_of([40, 40, 9]), GREEDY, use_tqdm=False))


@pytest.mark.parametrize(
    "engine_process", [False, pytest.param(True, marks=pytest.mark.size("full"))]
)
def test_tasks_and_clients_get_them(engine_process: bool, tmp_path: Path) -> None:
    """From `AsyncLLM`, also at the end of streams, and as JSON."""
    pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
    from serving import ask, served

    from nanoserve.serve.async_llm import AsyncLLM

    routers = make("qwen3-moe", tmp_path, vocab_size=VOCAB_SIZE)
    (prompt,) = prompts_of([30])

    async def last_of(llm: AsyncLLM, kind: RequestOutputKind) -> list[CompletionOutput]:
        params = SamplingParams(n=2, seed=1, max_tokens=5, output_kind=kind)
        found: dict[int, list[CompletionOutput]] = {0: [], 1: []}
        async for output in llm.generate(prompt, params):
            for new in output.outputs:
                found[new.index].append(new)
        for pieces in found.values():
            if kind is RequestOutputKind.DELTA:
                pieces[-1].token_ids = [i for piece in pieces for i in piece.token_ids]
        return [pieces[-1] for pieces in found.values()]

    llm = AsyncLLM(
        tmp_path,
        tokenizer="tiny-qwen3",
        attention_backend="torch",
        num_kv_blocks=32,
        engine_process=engine_process,
        enable_return_routed_experts=True,
    )
    with served(llm) as server:
        for kind in RequestOutputKind:
            for completion in asyncio.run(last_of(llm, kind)):
                assert check(routers, prompt, completion) == 30 + 5 - 1
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "return_token_ids": True}
        status, _, answer = ask(server, "/v1/completions", body)
        assert status == 200
        (choice,) = answer["choices"]
        experts = np.load(BytesIO(base64.b64decode(choice["routed_experts"])))
        expected = routers([*prompt, *choice["token_ids"]])[: len(experts)]
        np.testing.assert_array_equal(experts, expected)
        messages = [{"role": "user", "content": "What is a KV cache?"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 3}
        _, _, answer = ask(server, "/v1/chat/completions", body)
        experts = np.load(BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))
        assert experts.shape[1:] == (2, 3)
    llm.shutdown()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "settings", "options", "message"),
    [
        ("qwen3", {}, {}, "no layer of this Qwen3ForCausalLM has experts: remove the option"),
        (
            "qwen3-moe",
            {"decoder_sparse_step": 3},
            {},
            "no layer of this Qwen3MoeForCausalLM has experts",
        ),
        (
            "mixtral",
            {"sliding_window": 9},
            {"disable_hybrid_kv_cache_manager": False},
            "sliding window of 9 tokens.*set enable_prefix_caching=False or",
        ),
        (
            "mixtral",
            {},
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 splits the layers.*use tensor_parallel_size",
        ),
        (
            "mixtral",
            {},
            {"speculative_config": {"method": "ngram", "enforce_eager": False}},
            "add 'enforce_eager': True to speculative_config",
        ),
        ("mixtral", {}, {"enable_return_routed_experts": "yes"}, "'yes' must be True or False"),
    ],
    ids=["no experts", "all dense", "windows", "pipeline", "draft graphs", "no truth value"],
)
def test_what_is_refused(
    name: str, settings: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if name == "qwen3":
        make_qwen3(tmp_path)
    else:
        make(name, tmp_path, **settings)
    with pytest.raises(ValueError, match=message):
        engine(tmp_path, **options)


class SilentMoE(MixtralMoE):
    """Experts of a model of one's own, which record nothing."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        if index == 1:
            context = replace(context, routed_experts=None)
        super().__init__(config, index, context)


class SilentForCausalLM(OurMixtral):
    mlp_class = SilentMoE


def test_layers_that_record_nothing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("mixtral", tmp_path)
    monkeypatch.setitem(MODELS._entries, "MixtralForCausalLM", SilentForCausalLM)
    with pytest.raises(ValueError, match=r"layers \[1\] of MixtralForCausalLM do not record"):
        engine(tmp_path)
