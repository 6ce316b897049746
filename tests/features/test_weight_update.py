"""Weights that a trainer replaces: the engine answers as a new one with them, bit for bit."""

import asyncio
import gc
import resource
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from quantized_checkpoints import SIZES, make_quantized, write_gptq
from safetensors.torch import load_file, save_file
from tiny_checkpoints import GEMMA2, edit_json, make_checkpoint, make_qwen3
from transformers import Gemma2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from nanoserve import LLM, AsyncLLM, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.state_dict import write_files
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.sleep import Sleeper
from nanoserve.features.weight_update import WeightUpdater
from nanoserve.models.layers.context import LayerContext
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.worker.cpu_device import CpuDevice
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.weight_exchange import WeightExchange

PROMPTS = [[5, 6, 7], [*range(40)], [9] * 33]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.8, max_tokens=7, n=2, seed=4, ignore_eos=True),
]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 30, "block_size": 4}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, {}),
    "tied": (Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "gemma2": (Gemma2ForCausalLM, GEMMA2),  # its norm adds 1 to the weight after loading
    "moe": (Qwen3MoeForCausalLM, MOE),
}
TORCH = {"attention_backend": "torch"}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", TORCH),
    ("qwen3", {"dtype": "bfloat16"}),
    ("qwen3", {"dtype": "bfloat16", **TORCH}),
    ("qwen3", {"quantization": "int8"}),
    ("qwen3", {"quantization": "int8", "quantization_activations": "none", **TORCH}),
    ("qwen3", {"async_scheduling": True}),
    ("qwen3", {"kv_cache_dtype": "int8"}),
    ("qwen3", {"load_format": "dummy"}),
    ("tied", {}),
    ("tied", {"quantization": "int8", "dtype": "bfloat16"}),
    ("gemma2", {"num_kv_blocks": 100}),
    ("gemma2", {"num_kv_blocks": 100, "dtype": "bfloat16"}),
    ("moe", {}),
    ("moe", {"quantization": "int8"}),
    ("moe", {"dtype": "bfloat16", **TORCH}),
]


def answers(llm: LLM) -> list[Any]:
    """All that the outputs have but the version of the weights."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        ([(o.token_ids, o.logprobs) for o in output.outputs], output.prompt_logprobs)
        for output in outputs
    ]


def finish(llm: LLM) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.engine.step()}
    return outputs


def make(name: str, path: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint, and return its tensors as its own files have them."""
    architecture, settings = MODELS[name]
    make_checkpoint(architecture, path, seed, **settings)
    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one shape, whose weights differ."""
    paths = [tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")]
    for seed, path in enumerate(paths):
        make_qwen3(path, seed)
    return paths


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# ---------------------------------------------------------------------- as a new engine


@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_it_answers_as_a_new_engine(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    options = OPTIONS | options
    _, new = make(name, tmp_path / "old", 1), make(name, tmp_path / "new", 2)
    plain = {key: value for key, value in options.items() if key != "load_format"}
    with LLM(tmp_path / "new", **plain) as llm:
        # With a prefix-cache hit in the second round, where bits may differ with a row's length.
        expected = [answers(llm), answers(llm)]
    before = {key: value.clone() for key, value in new.items()}
    with LLM(tmp_path / "old", **options) as llm:
        old = answers(llm)
        assert old != expected[0]
        assert llm.update_weights(new) == llm.weights_version == 1
        assert llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0].num_cached_tokens == 0
        llm.reset_prefix_cache()
        assert [answers(llm), answers(llm)] == expected
        # The source is neither changed nor kept.
        assert all(torch.equal(value, before[key]) for key, value in new.items())
        for value in new.values():
            value.zero_()
        llm.reset_prefix_cache()
        assert answers(llm) == expected[0]
        if "load_format" not in options:
            assert llm.update_weights(tmp_path / "old") == 2
            assert answers(llm) == old
        llm.engine.scheduler.check()


@pytest.mark.size("full")
@pytest.mark.parametrize("name", ["int4", "int4 tied"])
def test_four_bits(name: str, tmp_path: Path) -> None:
    """Groups of at least 32 inputs: another shape than that of the other tests."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": "tied" in name}
    for seed, path in enumerate((tmp_path / "old", tmp_path / "new")):
        make_qwen3(path, seed, **sizes)
    options = OPTIONS | {"quantization": "int4", "quantization_group_size": 32}
    with LLM(tmp_path / "new", **options) as llm:
        expected = answers(llm)
    with LLM(tmp_path / "old", **options) as llm:
        assert answers(llm) != expected
        llm.update_weights(weights_of(tmp_path / "new"))
        assert answers(llm) == expected


def test_a_source_has_many_forms(folders: list[Path], tmp_path: Path) -> None:
    weights = weights_of(folders[1])
    module = Qwen3ForCausalLM.from_pretrained(folders[1])
    write_files(iter(weights.items()), tmp_path)
    sources = [
        weights,
        module,
        module.state_dict(),
        list(weights.items()),
        iter(weights.items()),
        folders[1],
        str(folders[1]),
        tmp_path,  # shards, without config.json
        {name: torch.nn.Parameter(weight) for name, weight in weights.items()},
        {name: weight.double() for name, weight in weights.items()},
        {name: weight.t().contiguous().t() for name, weight in weights.items() if weight.ndim == 2}
        | {name: weight for name, weight in weights.items() if weight.ndim < 2},
    ]
    with LLM(folders[1], **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS) as llm:
        for number, source in enumerate(sources, 1):
            llm.update_weights(folders[0])
            assert answers(llm) != expected
            assert llm.update_weights(source) == 2 * number
            assert answers(llm) == expected


def test_a_tied_tensor_is_given_twice_or_once(tmp_path: Path) -> None:
    make("tied", tmp_path / "old", 1)
    new = make("tied", tmp_path / "new", 2)
    twin = new["model.embed_tokens.weight"]
    with LLM(tmp_path / "new", **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(tmp_path / "old", **OPTIONS) as llm:
        old = answers(llm)
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from"):
            llm.update_weights(new | {"lm_head.weight": twin + 1})
        llm.reset_prefix_cache()
        assert answers(llm) == old
        for twins in ({"lm_head.weight": twin}, {"lm_head.weight": twin.clone()}, {}):
            llm.update_weights({key: v for key, v in new.items() if "lm_head" not in key} | twins)
            assert answers(llm) == expected


# ---------------------------------------------------------------------- errors


def broken_sources(good: dict[str, torch.Tensor]) -> dict[str, tuple[Any, type[Exception], str]]:
    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: value for key, value in good.items() if key != name}

    def stops() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(good.items())[:9]
        raise RuntimeError("the trainer has stopped")

    return {
        "missing": (without, ValueError, f"missing: {name}"),
        "unexpected": (good | {"more.weight": good[name]}, ValueError, "unexpected: more.weight"),
        "misshapen": (good | {name: good[name].t()}, ValueError, "misshapen: .*up_proj"),
        "integers": (good | {name: good[name].int()}, ValueError, f"{name} is a tensor of .*int32"),
        "meta": (good | {name: good[name].to("meta")}, ValueError, "up_proj.* on meta"),
        "array": (good | {name: good[name].numpy()}, ValueError, "up_proj.* is ndarray, not"),
        "twice": ([*good.items(), (name, good[name])], ValueError, "up_proj.* is given twice"),
        "no pairs": ([*good.values()], ValueError, "is not a pair"),
        "nothing": ({}, ValueError, "missing"),
        "a number": (5, ValueError, "source=5 is neither a folder nor a mapping"),
        "stops": (stops(), RuntimeError, "the trainer has stopped"),
        "no folder": ("/no/such/folder", ValueError, "neither a folder nor a GGUF file"),
    }


BROKEN = list(broken_sources({"model.layers.1.mlp.up_proj.weight": torch.ones(2, 3)}))


@pytest.mark.parametrize("keep_old", [True, False])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_source_changes_nothing(kind: str, keep_old: bool, folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        expected = answers(llm)
        model = llm.engine.executor.model
        source, error, message = broken_sources(weights_of(folders[1]))[kind]
        with pytest.raises(error, match=message):
            llm.update_weights(source, keep_old=keep_old)
        assert llm.engine.executor.model is model and llm.weights_version == 0
        assert llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0].num_cached_tokens > 0
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def test_a_broken_folder_changes_nothing(folders: list[Path], tmp_path: Path) -> None:
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    damaged.mkdir()
    content = (folders[1] / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[: len(content) // 2])
    with LLM(folders[0], **OPTIONS) as llm:
        expected = answers(llm)
        for folder in (empty, damaged):
            with pytest.raises(ValueError, match=str(folder)):
                llm.update_weights(folder)
            llm.reset_prefix_cache()
            assert answers(llm) == expected


def test_a_folder_must_have_the_same_model(tmp_path: Path) -> None:
    """Its config.json, if it has one, tells models apart whose weights have the same shapes."""
    old, new = tmp_path / "old", tmp_path / "new"
    make_qwen3(old)
    make_qwen3(new, seed=1, dtype="bfloat16")
    with LLM(old, **OPTIONS) as llm:
        expected = answers(llm)
        edit_json(new / "config.json", rms_norm_eps=1e-3, hidden_act="gelu_pytorch_tanh")
        with pytest.raises(ValueError, match="another model: rms_norm_eps, hidden_act differs"):
            llm.update_weights(new)
        edit_json(new / "config.json", architectures=["OtherForCausalLM"])
        with pytest.raises(ValueError, match="OtherForCausalLM"):
            llm.update_weights(new)
        llm.reset_prefix_cache()
        assert answers(llm) == expected
        (new / "config.json").unlink()
        llm.update_weights(new)
        assert answers(llm) != expected


def test_arguments_are_checked(folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        for wrong in ({"mode": "drain"}, {"version": 1.5}, {"version": True}, {"keep_old": None}):
            (name,) = wrong
            with pytest.raises(ValueError, match=f"{name}="):
                llm.update_weights(folders[1], **wrong)
        with pytest.raises(ValueError, match="mode='keep' needs keep_old=True"):
            llm.update_weights(folders[1], mode="keep", keep_old=False)
        assert llm.weights_version == 0
        assert llm.update_weights(folders[1], version="step 7") == "step 7"
        assert llm.update_weights(folders[1]) == 2
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert {tuple(c.weights_versions) for o in outputs for c in o.outputs} == {((0, 2),)}
    with pytest.raises(ValueError, match="closed"):
        llm.update_weights(folders[1])


def test_a_quantized_checkpoint_needs_its_own_format(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    old, new = tmp_path / "old", tmp_path / "new"
    make_quantized(old, write_gptq, config)
    plain = make_quantized(new, write_gptq, config, seed=1)
    make_qwen3(tmp_path / "plain", **SIZES)
    with LLM(new, **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(old, **OPTIONS) as llm:
        before = answers(llm)
        with pytest.raises(ValueError, match=r"quantized \(gptq\), which dict is not; pass a"):
            llm.update_weights(plain)
        with pytest.raises(ValueError, match=r"has another model: quantization_config differs"):
            llm.update_weights(tmp_path / "plain")
        llm.reset_prefix_cache()
        assert answers(llm) == before != expected
        llm.update_weights(new)
        assert answers(llm) == expected


def test_a_device_that_cannot_be_prepared_goes_on_with_the_old_model(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        expected = answers(llm)
        runner = llm.engine.executor
        old, warm_up = runner.model, ModelRunner.warm_up

        def fails(self: ModelRunner) -> None:
            if self.model is not old:
                raise MemoryError("no room for graphs")
            warm_up(self)

        monkeypatch.setattr(ModelRunner, "warm_up", fails)
        with pytest.raises(MemoryError):
            llm.update_weights(folders[1])
        assert runner.model is old and llm.weights_version == 0
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def test_two_models_have_to_fit(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folders[1], **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS) as llm:
        runner = llm.engine.executor
        weights = sum(weight.nbytes for weight in weights_of(folders[0]).values())
        num_bytes = 31 * runner.kv_cache_layout.block_bytes + 2 * weights - 1
        monkeypatch.setattr(CpuDevice, "memory_bytes", lambda self, parallel: num_bytes)
        with pytest.raises(ValueError, match=r"do not fit .* use keep_old=False"):
            llm.update_weights(folders[1])
        llm.update_weights(folders[1], keep_old=False)
        assert answers(llm) == expected


# ---------------------------------------------------------------------- unfinished requests


def test_unfinished_requests_need_a_mode(folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        for number in range(2):
            llm.engine.add_request(str(number), PROMPTS[number], LONG)
        llm.engine.step()
        with pytest.raises(ValueError, match="2 requests are unfinished"):
            llm.update_weights(folders[1])
        assert llm.weights_version == 0
        outputs = finish(llm)
        expected = llm.generate(PROMPTS[:2], LONG, use_tqdm=False)
        for number, output in enumerate(expected):
            assert outputs[str(number)].outputs[0] == output.outputs[0]


def test_wait_runs_them_to_their_end(folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        expected = llm.generate(PROMPTS[1], LONG, use_tqdm=False)[0].outputs[0]
        stream = llm.stream(PROMPTS[1], LONG)
        first = next(stream).outputs[0].token_ids
        llm.engine.add_request("0", PROMPTS[1], LONG)
        assert llm.update_weights(folders[1], mode="wait") == 1
        rest = [token_id for output in stream for token_id in output.outputs[0].token_ids]
        assert first + rest == expected.token_ids
        assert finish(llm)["0"].outputs[0] == expected


@pytest.mark.parametrize("keep_old", [True, False])
def test_abort_ends_them(folders: list[Path], keep_old: bool) -> None:
    with LLM(folders[1], **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS) as llm:
        manager = llm.engine.scheduler.block_manager
        for number in range(2):
            llm.engine.add_request(str(number), PROMPTS[number], LONG)
        for _ in range(4):
            llm.engine.step()
        # A broken source aborts nothing.
        with pytest.raises(ValueError, match="missing"):
            llm.update_weights({}, mode="abort", keep_old=keep_old)
        assert len(llm.engine.output_processor.requests) == 2
        llm.update_weights(folders[1], mode="abort", keep_old=keep_old)
        assert manager.num_free_blocks == manager.num_blocks
        outputs = finish(llm)
        assert len(outputs) == 2
        for output in outputs.values():
            (completion,) = output.outputs
            assert completion.finish_reason == "abort" and len(completion.token_ids) > 0
            assert completion.weights_versions == [(0, 0)]
        assert answers(llm) == expected


@pytest.mark.small(options=[{}, {"async_scheduling": True}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"async_scheduling": True, "dtype": "bfloat16"},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"method": "suffix", "adaptive": False}},
    ],
    ids=str,
)
def test_keep_continues_with_the_new_weights(options: dict[str, Any], folders: list[Path]) -> None:
    """Tokens before the update are the old ones; later requests see nothing of it."""
    with LLM(folders[0], **OPTIONS | options) as llm:
        old = llm.generate(PROMPTS[1], LONG, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(folders[1], **OPTIONS | options) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS | options) as llm:
        scheduler = llm.engine.scheduler
        llm.engine.add_request("0", PROMPTS[1], LONG)
        for _ in range(9):
            llm.engine.step()
        llm.update_weights(folders[1], mode="keep", version="new")
        scheduler.check()
        (seq,) = scheduler.running
        num_old = seq.num_output_tokens
        assert 0 < num_old < 40
        llm.engine.step()
        # Not published under the new root, whatever was computed with the old weights.
        llm.engine.add_request("1", PROMPTS[1], LONG)
        outputs = finish(llm)
        (completion,) = outputs["0"].outputs
        assert completion.token_ids[:num_old] == old[:num_old]
        assert completion.token_ids != old
        assert completion.weights_versions == [(0, 0), (num_old, "new")]
        assert outputs["1"].num_cached_tokens == 0
        assert outputs["1"].outputs[0].weights_versions == [(0, "new")]
        llm.reset_prefix_cache()
        assert answers(llm) == expected
        scheduler.check()


def test_deltas_count_versions_from_their_first_token(folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        assert next(stream).outputs[0].weights_versions == [(0, 0)]
        llm.update_weights(folders[1], mode="keep")
        rest = [output.outputs[0].weights_versions for output in stream]
        assert rest[-1] == [(0, 1)] and {*map(str, rest)} <= {"[(0, 0)]", "[(0, 1)]"}


@pytest.mark.small(seed=[0])
@pytest.mark.parametrize("seed", range(4))
def test_keep_while_sequences_are_preempted(seed: int, folders: list[Path]) -> None:
    """In a tiny pool, with updates in between: all end, no block is lost, nothing old is found."""
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=30, ignore_eos=True)
    prompts = [[*range(number, number + 20)] for number in range(6)]
    options = OPTIONS | {"num_kv_blocks": 30, "max_num_seqs": 6, "async_scheduling": bool(seed % 2)}
    with LLM(folders[1], **options) as llm:
        expected = answers(llm)
    with LLM(folders[0], **options) as llm:
        scheduler = llm.engine.scheduler
        for number, prompt in enumerate(prompts):
            llm.engine.add_request(str(number), prompt, params)
        outputs: dict[str, RequestOutput] = {}
        num_steps = 0
        while llm.engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.engine.step()}
            num_steps += 1
            scheduler.check()
            if num_steps % 7 == 3:
                llm.update_weights(folders[num_steps % 2], mode="keep")
                scheduler.check()
        assert len(outputs) == 6 and llm.stats.num_preemptions > 0
        for output in outputs.values():
            (completion,) = output.outputs
            assert len(completion.token_ids) == 30 and completion.finish_reason == "length"
            starts = [start for start, _ in completion.weights_versions]
            assert starts[0] == 0 and starts == sorted(set(starts)) and len(starts) > 1
        assert scheduler.block_manager.num_free_blocks == 30
        llm.update_weights(folders[1])
        assert llm.generate(prompts[0], params, use_tqdm=False)[0].num_cached_tokens == 0
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def test_a_request_that_was_made_before_shares_nothing_old(folders: list[Path]) -> None:
    """The number of the weights is that of the engine when a request is queued."""
    with LLM(folders[1], **OPTIONS) as llm:
        expected = llm.generate(PROMPTS[1], LONG, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(folders[0], **OPTIONS) as llm:
        request = llm.engine.input_processor.process("late", PROMPTS[1], LONG)
        llm.engine.add_request("0", PROMPTS[1], LONG)
        llm.engine.step()
        llm.update_weights(folders[1], mode="keep")
        llm.engine.add(request)
        output = finish(llm)["late"]
        assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == expected


def test_running_requests_may_recompute_their_kv(folders: list[Path]) -> None:
    """`reset_running_requests` after the update: as if all tokens had been a prompt."""
    with LLM(folders[0], **OPTIONS) as llm:
        llm.engine.add_request("0", PROMPTS[1], LONG)
        for _ in range(9):
            llm.engine.step()
        llm.update_weights(folders[1], mode="keep")
        llm.reset_prefix_cache(reset_running_requests=True)
        (completion,) = finish(llm)["0"].outputs
        (_, (num_old, _)) = completion.weights_versions
        rest = SamplingParams(temperature=0, max_tokens=40 - num_old, ignore_eos=True)
        prompt = PROMPTS[1] + completion.token_ids[:num_old]
        (again,) = llm.generate([prompt], rest, use_tqdm=False)
        assert again.outputs[0].token_ids == completion.token_ids[num_old:]


def test_not_inside_a_step(folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        raised: list[Exception] = []

        def update(*step: Any) -> None:
            try:
                llm.update_weights(folders[1], mode="keep")
            except RuntimeError as error:
                raised.append(error)

        llm.engine.observers.append(update)
        llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)
        assert raised and "inside a step" in str(raised[0])
        assert llm.weights_version == 0


# ---------------------------------------------------------------------- memory


def test_many_updates_leave_nothing_behind(folders: list[Path], by_size: Any) -> None:
    num_updates = by_size(40, 200)
    weights = [weights_of(folder) for folder in folders]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folders[0], **OPTIONS) as llm:
        manager = llm.engine.scheduler.block_manager
        expected = [llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].token_ids]
        llm.update_weights(weights[1])
        expected.append(llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].token_ids)
        gc.collect()
        gc.disable()  # the old model must not need the garbage collector
        try:
            for number in range(num_updates):
                old = weakref.ref(next(llm.engine.executor.model.parameters()))
                llm.update_weights(weights[number % 2])
                assert old() is None
                for hit in (False, True):
                    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
                    assert (output.num_cached_tokens > 0) == hit
                    assert output.outputs[0].token_ids == expected[number % 2]
                manager.check([])
                assert len(manager.prefix_cache.hashes()) <= manager.num_blocks
                if number == num_updates // 4:
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        finally:
            gc.enable()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 50 * 1024  # KiB
        assert manager.num_free_blocks == manager.num_blocks


# ---------------------------------------------------------------------- sleep


@pytest.mark.parametrize("keep_old", [True, False])
def test_the_order_of_reinforcement_learning(folders: list[Path], keep_old: bool) -> None:
    """Weights are replaced after they have woken, or while they sleep; the KV cache wakes later."""
    with LLM(folders[1], **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS) as llm:
        old = answers(llm)
        for level in (1, 2):
            for first in (["weights"], ["kv_cache"], []):
                llm.update_weights(folders[0])
                assert answers(llm) == old
                llm.sleep(level)
                llm.wake_up(first)
                with pytest.raises(ValueError, match="missing: "):  # of the source
                    llm.update_weights({})
                assert "asleep" in str(llm.engine.refusal)
                version = llm.update_weights(weights_of(folders[1]), keep_old=keep_old)
                is_awake = llm.engine.refusal is None
                assert is_awake == (first == ["kv_cache"])
                llm.wake_up(["kv_cache"])
                assert llm.weights_version == version
                assert answers(llm) == expected


def test_level_2_reads_the_checkpoint_again(folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        old = answers(llm)
        llm.update_weights(folders[1], version="trained")
        new = answers(llm)
        llm.sleep(1)
        llm.wake_up()
        assert llm.weights_version == "trained" and answers(llm) == new
        llm.sleep(2)
        llm.wake_up()
        assert llm.weights_version == 0 and answers(llm) == old
        assert llm.update_weights(folders[1]) == 3  # no number is used twice


def test_a_failure_behind_the_exchange_keeps_the_new_version(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folders[1], **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS) as llm:
        answers(llm)

        def fails(runner: ModelRunner) -> None:
            raise MemoryError("no room for the KV cache")

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "restore_kv_caches", fails)
            with pytest.raises(MemoryError):
                llm.update_weights(folders[1], keep_old=False)
        assert llm.weights_version == 1 and "missing: kv_cache" in str(llm.engine.refusal)
        llm.wake_up()
        assert llm.weights_version == 1 and answers(llm) == expected


def test_without_the_old_weights_a_failure_puts_it_to_sleep(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = WeightExchange.load_weights
    weights = weights_of(folders[1])
    with LLM(folders[1], **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS) as llm:
        old = answers(llm)

        def fails(self: WeightExchange, source: Any) -> None:
            assert llm.engine.executor.model is None  # dropped before
            raise OSError("the disk is gone")

        for recover in (lambda: llm.update_weights(weights), llm.wake_up):
            monkeypatch.setattr(WeightExchange, "load_weights", fails)
            with pytest.raises(OSError, match="gone"):
                llm.update_weights(weights, keep_old=False)
            with pytest.raises(ValueError, match=r"asleep: wake_up.* missing: weights"):
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            monkeypatch.setattr(WeightExchange, "load_weights", load)
            recover()
            llm.wake_up()
            assert answers(llm) == (old if llm.weights_version == 0 else expected)


# ---------------------------------------------------------------------- draft models


def test_a_draft_model_keeps_its_own_weights(by_size: Any) -> None:
    """What it proposes is accepted less often; what comes out is what the new weights say."""
    options: dict[str, Any] = {"num_kv_blocks": 60, "dtype": "float32"}
    prompts = [[{"role": "user", "content": text}] for text in ("Hello", "What is 3 + 4?")]
    with LLM("tiny-qwen3", **options) as llm:
        folder = Path(llm.engine.executor.path)
        weights = {
            name: weight * 1.02 if "norm" in name else weight
            for name, weight in weights_of(folder).items()
        }
        llm.update_weights(weights)
        expected = [output.outputs[0].token_ids for output in llm.chat(prompts, use_tqdm=False)]
    methods = [("draft_model", "tiny-qwen3-draft"), ("hidden_head", "tiny-qwen3")]
    for method, model in methods[: by_size(2, 2)]:
        config = {"method": method, "model": model, "adaptive": False}
        with LLM("tiny-qwen3", speculative_config=config, **options) as llm:
            llm.chat(prompts, use_tqdm=False)
            llm.update_weights(weights)
            found = [output.outputs[0].token_ids for output in llm.chat(prompts, use_tqdm=False)]
            assert found == expected
            assert llm.stats.num_draft_tokens > 0


# ---------------------------------------------------------------------- graphs


def test_graphs_are_captured_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels are interpreted here, and its sampling takes a second; it is tested elsewhere.
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)
    cuda = FakeCuda()
    config = EngineConfig(str(checkpoint), num_kv_blocks=30, max_num_seqs=4)
    config, model_config = config.for_device("cuda"), ModelConfig.from_checkpoint(checkpoint)
    context, device = LayerContext(), CudaDevice(config, cuda, is_capturable=True)
    runner = ModelRunner.load(config, model_config, checkpoint, context, device)
    monkeypatch.setattr(CudaDevice, "memory_bytes", lambda device, parallel: 2**33)
    engine = GuardedEngine(config, model_config, runner, None)

    def tokens() -> list[list[int]]:
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, PARAMS[0])
        done: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        return [done[str(number)] for number in range(len(PROMPTS))]

    weights = weights_of(checkpoint)
    other = {name: weight.flip(0) for name, weight in weights.items()}
    updater = WeightUpdater(engine, Sleeper(engine))
    old = tokens()
    for source, is_same in ((other, False), (weights, True)):
        cuda.events.clear()
        for parameter in runner.model.parameters():  # what was recorded must not be read again
            parameter.data.fill_(torch.nan)
        updater.update(source)
        assert cuda.events[0] == "synchronize" and cuda.events.count("capture 4") > 0
        assert (tokens() == old) == is_same
        assert any(event.startswith("replay") for event in cuda.events)


def test_save_file_is_what_a_folder_needs(folders: list[Path], tmp_path: Path) -> None:
    """A trainer that writes one file into memory: no config.json, no index."""
    save_file(weights_of(folders[1]), tmp_path / "model.safetensors")
    with LLM(folders[1], **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(folders[0], **OPTIONS) as llm:
        llm.update_weights(tmp_path)
        assert answers(llm) == expected


# ---------------------------------------------------------------------- in an event loop


@pytest.mark.small(engine_process=[False])
@pytest.mark.parametrize("engine_process", [False, True])
def test_an_event_loop_updates_between_two_steps(engine_process: bool, folders: list[Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        old = llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0].outputs[0]
    with LLM(folders[1], **OPTIONS) as llm:
        expected = llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0].outputs[0]

    async def complete(llm: AsyncLLM, params: SamplingParams) -> CompletionOutput:
        outputs = [output async for output in llm.generate(PROMPTS[1], params)]
        return outputs[-1].outputs[0]

    async def run() -> None:
        async with AsyncLLM(folders[0], engine_process=engine_process, **OPTIONS) as llm:
            assert await complete(llm, PARAMS[0]) == old
            with pytest.raises(ValueError, match="mode='wait' is not supported"):
                await llm.update_weights(folders[1], mode="wait")
            with pytest.raises(ValueError, match="missing"):
                await llm.update_weights({})
            running = asyncio.create_task(complete(llm, LONG))
            await asyncio.sleep(0.01)
            assert await llm.update_weights(folders[1], mode="keep", version="new") == "new"
            assert len((await running).token_ids) == 40
            await llm.reset_prefix_cache()
            found = await complete(llm, PARAMS[0])
            assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
            assert found.weights_versions == [(0, "new")]

    asyncio.run(run())


def test_streams_made_of_tokens_alone_have_versions_too() -> None:
    """So do those with log-probabilities, of which a slow reader gets several in one output."""
    options = {"dtype": "float32", "num_kv_blocks": 200, "max_model_len": 512}
    kinds = [{}, {"logprobs": 0}, {"n": 2, "temperature": 0.8, "seed": 3}]
    long = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
    with LLM("tiny-qwen3", **options) as llm:
        weights = weights_of(Path(llm.engine.executor.path))
        params = [SamplingParams(**long | kind) for kind in kinds]
        old = [o.outputs for o in llm.generate(["What is"] * 3, params, use_tqdm=False)]

    async def read(
        outputs: AsyncIterator[RequestOutput],
        num_completions: int,
        go_on: asyncio.Event,
        has_begun: asyncio.Event,
    ) -> list[tuple[list[int], list[tuple[int, int | str]]]]:
        token_ids: dict[int, list[int]] = {}
        versions: dict[int, list[tuple[int, int | str]]] = {}
        async for output in outputs:
            for part in output.outputs:
                known = versions.setdefault(part.index, [])
                assert part.weights_versions[0][0] == 0
                num_before = len(token_ids.setdefault(part.index, []))
                for start, version in part.weights_versions:
                    assert start < max(1, len(part.token_ids))
                    if not known or known[-1][1] != version:
                        known.append((num_before + start, version))
                token_ids[part.index] += part.token_ids
            if len(token_ids) == num_completions:  # the second one begins later than the first
                has_begun.set()
                await go_on.wait()
        return [(token_ids[index], versions[index]) for index in sorted(token_ids)]

    async def run() -> None:
        async with AsyncLLM("tiny-qwen3", **options) as llm:
            # Steps before the update are so slow that no request ends before it, on a busy machine
            # either: 300 of them take 15 s.
            is_updated = threading.Event()
            llm.engine.observers.append(lambda *arguments: is_updated.wait(0.05))
            go_on, readers, begun = asyncio.Event(), [], []
            for kind in kinds:
                delta = SamplingParams(**long | kind, output_kind=RequestOutputKind.DELTA)
                begun.append(asyncio.Event())
                outputs = llm.generate("What is", delta)
                reader = read(outputs, kind.get("n", 1), go_on, begun[-1])
                readers.append(asyncio.create_task(reader))
            for event in begun:
                await event.wait()
            other = {name: w * 3 if "norm" in name else w for name, w in weights.items()}
            await llm.update_weights(other, mode="keep", version="new")
            is_updated.set()
            await asyncio.sleep(0.05)  # tokens of both versions are unread
            go_on.set()
            for reader, expected in zip(readers, old, strict=True):
                for (token_ids, versions), plain in zip(await reader, expected, strict=True):
                    first, (num_old, version) = versions
                    assert first == (0, 0) and version == "new" and 0 < num_old < 300
                    assert token_ids[:num_old] == plain.token_ids[:num_old]
                    assert len(token_ids) == 300

    asyncio.run(run())
