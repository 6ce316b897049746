"""Models with recurrent states, whatever happens to their sequences: transformers' tokens.

A state belongs to all tokens before it. So nothing may skip a token, or add one twice: no chunk, no
preemption, no slot that another sequence had before, no step that was planned ahead.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from greedy_outputs import PARAMS
from greedy_outputs import assert_like as assert_outputs_like
from model_fuzz import VOCAB_SIZE, Difference, ModelRun, reference_engine
from safetensors.torch import load_file, save_file
from tiny_checkpoints import DELTA, DELTA_MOE, edit_json, make_checkpoint
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

from nanoserve import LLM, BeamSearchParams, SamplingParams
from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.recurrent_state import RecurrentState
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.draft_room import add_draft_tokens
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.features.recurrent_options import supported_options
from nanoserve.models import registry
from nanoserve.models.layers.context import LayerContext
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.kv_cache import KVCacheLayout, kv_block_bytes
from nanoserve.worker.load_model import allocate_caches
from nanoserve.worker.model_runner import ModelRunner

PROMPTS = [[(i * i + 7 * j) % 300 for j in range(1 + 13 * i % 60)] for i in range(8)]
LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4}
TINY_POOL = {"block_size": 4, "num_kv_blocks": 24, "max_model_len": 96}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    path = tmp_path_factory.mktemp("recurrent")
    return make_checkpoint(Qwen3_5ForCausalLM, path, **DELTA), path


@pytest.fixture(scope="module")
def path(made: tuple[PreTrainedModel, Path]) -> Path:
    return made[1]


@torch.inference_mode()
def logprobs(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Of all tokens, [num_output_tokens, vocab_size], computed in one pass."""
    logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(dim=-1)


def assert_like(model: PreTrainedModel, llm: LLM) -> None:
    assert_outputs_like(model, llm, PROMPTS)
    llm.engine.scheduler.check()


def greedy(path: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with LLM(path, **OPTIONS | options) as llm:
        outputs = llm.generate(prompts, LONG, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.small(chunk=[7], ahead=[True], backend=["torch"])
@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_same_as_transformers_in_chunks_and_a_tiny_pool(
    chunk: int, ahead: bool, backend: str, made: tuple[PreTrainedModel, Path]
) -> None:
    if backend == "numba":
        pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
    model, path = made
    options = {"attention_backend": backend, "async_scheduling": ahead, **OPTIONS, **TINY_POOL}
    with LLM(path, **options, long_prefill_token_threshold=chunk) as llm:
        assert_like(model, llm)
        assert llm.stats.num_preemptions > 0, "the pool is not tiny"
        assert llm.stats.prefix_cache_hits == 0


def test_completions_of_one_prompt_are_those_of_as_many_requests(path: Path) -> None:
    """They cannot share the blocks of their prompt: each computes it, and so its own state."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=4, ignore_eos=True, n=3)
    with LLM(path, **OPTIONS) as llm:
        (output,) = llm.generate([PROMPTS[4]], params, use_tqdm=False)
        together = [completion.token_ids for completion in output.outputs]
        assert llm.stats.prefix_cache_hits == 0
    with LLM(path, **OPTIONS | {"max_num_seqs": 1}) as llm:
        (alone,) = llm.generate([PROMPTS[4]], params, use_tqdm=False)
    assert together == [completion.token_ids for completion in alone.outputs]
    assert len({*map(tuple, together)}) == 3


@pytest.mark.size("full")
def test_beams_have_the_scores_of_their_tokens(made: tuple[PreTrainedModel, Path]) -> None:
    model, path = made
    prompt = PROMPTS[3]
    with LLM(path, **OPTIONS) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
        (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    assert len(output.sequences) == 3
    for beam in output.sequences:
        new = beam.tokens[len(prompt) :]
        expected = logprobs(model, prompt, new)[range(len(new)), new].sum()
        assert abs(beam.cum_logprob - float(expected)) < 1e-3


@pytest.mark.small(ahead=[True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_slot_is_clean_for_the_next_sequence(ahead: bool, path: Path) -> None:
    """Also if its last one was aborted while a step that still advances it was in flight."""
    (expected,) = greedy(path, [PROMPTS[2]])
    with LLM(path, **OPTIONS | {"max_num_seqs": 1}, async_scheduling=ahead) as llm:
        engine = llm.engine
        for count in (1, 2, 5):
            engine.add_request("aborted", PROMPTS[5], LONG)
            engine.add_request("next", PROMPTS[2], LONG)
            for _ in range(count):
                engine.step()
            engine.abort_request("aborted")
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            assert outputs[-1].outputs[0].token_ids == expected, count


@pytest.mark.size("full")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_ahead_does_not_outlive_a_stop_token(ahead: bool, path: Path) -> None:
    """The step after a stop token has been launched when it is found, and advances the state."""
    answers = greedy(path, PROMPTS)
    stops = [SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[a[9]]) for a in answers]
    with LLM(path, **OPTIONS | {"max_num_seqs": 2}, async_scheduling=ahead) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, stops, use_tqdm=False)
            for output, answer in zip(outputs, answers, strict=True):
                (completion,) = output.outputs
                assert completion.token_ids == answer[: answer.index(answer[9])]


def test_states_survive_an_update_of_weights_in_a_pause(path: Path) -> None:
    """By the same weights: so nothing may change, in the middle of an answer."""
    (expected,) = greedy(path, [PROMPTS[6]])
    with LLM(path, **OPTIONS) as llm:
        llm.engine.add_request("0", PROMPTS[6], LONG)
        for number in range(9):
            llm.engine.step()
            if number in (4, 6):
                llm.pause_generation(mode="keep")
                llm.update_weights(path, mode="keep")
                llm.resume_generation()
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        assert outputs[-1].outputs[0].token_ids == expected


@pytest.mark.size("full")
@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_it_answers_as_before(level: int, made: tuple[PreTrainedModel, Path]) -> None:
    model, path = made
    with LLM(path, **OPTIONS) as llm:
        llm.generate(PROMPTS[:3], PARAMS, use_tqdm=False)
        (awake,) = llm.collective_rpc("memory_stats")
        llm.sleep(level=level)
        assert llm.engine.executor.kv_caches is None
        llm.wake_up()
        assert llm.collective_rpc("memory_stats") == [awake]
        assert_like(model, llm)


# ---------------------------------------------------------------- everything at once


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    path = tmp_path_factory.mktemp("fuzzed")
    make_checkpoint(Qwen3_5ForCausalLM, path, **DELTA, vocab_size=VOCAB_SIZE)
    with reference_engine(path) as llm:
        yield path, llm


@pytest.mark.size("full")
def test_every_request_gets_what_it_gets_alone(
    fuzzed: tuple[Path, LLM], by_size: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="nanoserve")
    counts: Counter[str] = Counter()
    for seed in range(by_size(0, 14, 200)):
        try:
            run = ModelRun(seed, *fuzzed)
            run.run()
        except (Difference, RuntimeError) as error:
            pytest.fail(f"seed {seed}, {run.options}: {error!r}")
        counts += run.counts
    wanted = ["requests", "aborts", "aborts inside a step", "preemptions", "streams"]
    assert all(counts[name] for name in wanted) and not counts["hit tokens"], counts


@pytest.mark.size("full")
def test_states_that_are_not_cleared_are_seen(
    fuzzed: tuple[Path, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: a sequence begins with the state that its slot has."""

    def load(self: RecurrentState, name: str, metadata: AttentionMetadata) -> torch.Tensor:
        return self.states[name][metadata.row_slots.long()]

    monkeypatch.setattr(RecurrentState, "load", load)
    with pytest.raises(Difference, match="alone"):
        for seed in range(14):
            ModelRun(seed, *fuzzed).run()


# ---------------------------------------------------------------- memory


def layout_of(path: Path, **options: Any) -> tuple[EngineConfig, ModelConfig, KVCacheLayout]:
    config = EngineConfig(str(path), **options).for_device("cpu")
    model_config = ModelConfig.from_checkpoint(path)
    return config, model_config, KVCacheLayout.of(config, model_config, LayerContext())


def test_only_layers_with_attention_have_kv(path: Path) -> None:
    config, model_config, layout = layout_of(path, max_num_seqs=7)
    assert [group.layers for group in layout.groups] == [(3,)]
    of_a_token = 2 * 2 * 16 * 4  # K and V, 2 heads of 16, in float32: of one layer out of four
    assert model_config.kv_bytes_per_token() == of_a_token
    assert layout.block_bytes == kv_block_bytes(config, model_config) == 16 * of_a_token
    of_a_slot = 3 * 4 * (3 * (2 * 2 * 8 + 4 * 12) + 4 * 8 * 12)  # three layers
    assert layout.states.num_bytes == (7 + 1) * of_a_slot
    caches = allocate_caches(layout, 5, torch.device("cpu"))
    states = [cache for cache in caches if isinstance(cache, RecurrentState)]
    assert [caches.index(state) for state in states] == [0, 1, 2]
    sizes = [x.nbytes for state in states for x in state.states.values()]
    assert sum(sizes) == layout.states.num_bytes
    assert caches[3].values.nbytes == 6 * layout.block_bytes


def test_states_that_do_not_fit_are_rejected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, layout = layout_of(path, max_num_seqs=7)
    pool = 5 * layout.block_bytes
    enough = layout.states.num_bytes + pool
    assert layout.states.rest_of(enough) == pool
    monkeypatch.setattr("nanoserve.worker.cpu_device.physical_memory_bytes", lambda: enough - pool)
    with pytest.raises(ValueError, match=r"states of max_num_seqs=7 .* lower max_num_seqs"):
        LLM(path, **OPTIONS | {"max_num_seqs": 7})


@pytest.mark.size("full")
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_on_a_gpu_that_is_none(
    enforce_eager: bool, made: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is counted. Graphs pad steps with dummy rows, which leave all states alone."""
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)
    path = made[1]
    expected = greedy(path, PROMPTS)
    options = {"max_num_seqs": 5, "enforce_eager": enforce_eager, "enable_prefix_caching": False}
    config = EngineConfig(str(path), **options).for_device("cuda")
    model_config, cuda = ModelConfig.from_checkpoint(path), FakeCuda()
    device = CudaDevice(config, cuda, is_capturable=True)
    runner = ModelRunner.load(config, model_config, path, LayerContext(), device)
    assert bool(device.programs) != enforce_eager
    engine = GuardedEngine(config, model_config, runner, tokenizer=None)
    done = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, LONG)
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert [done[str(number)] for number in range(len(PROMPTS))] == expected


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"structured_outputs_config": {"jump_forward": True}}, "jump_forward=True"),
        ({"batch_invariant": True}, "batch_invariant=True"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size .*use tensor_parallel_size"),
        ({"capture_sampling": True}, "capture_sampling=True"),
        ({"capture_mixed_steps": True}, "capture_mixed_steps=True"),
        ({"kv_events_config": {"enable_kv_cache_events": True}}, "kv_events_config"),
        ({"kv_offloading_size": 1}, "kv_offloading_size .*no prefix cache"),
        ({"kv_offloading_path": "kv"}, "kv_offloading_path .*no prefix cache"),
    ],
    ids=str,
)
def test_what_states_do_not_support_is_rejected(
    options: dict[str, Any], message: str, path: Path
) -> None:
    if "kv_events_config" in options:
        pytest.importorskip("zmq", reason="pip install 'nanoserve[kv-events]'")
    with pytest.raises(ValueError, match=rf"recurrent states.*{message}.*remove it"):
        LLM(path, **OPTIONS | options)


def test_what_is_on_by_default_is_turned_off(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(path, **OPTIONS) as llm:
        config = llm.engine.config
    assert not config.enable_prefix_caching
    assert [r.message for r in caplog.records if "recurrent" in r.message] == [
        "Qwen3_5ForCausalLM has recurrent states, hence enable_prefix_caching=False"
    ]
    on_gpu = EngineConfig(str(path)).for_device("cuda")
    assert supported_options(on_gpu, ModelConfig.from_checkpoint(path)).enforce_eager


def test_tokens_that_a_grammar_forces_are_no_draft_tokens(tmp_path: Path) -> None:
    """With other models on a CPU, they are by default: one step computes many of them."""
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    make_checkpoint(Qwen3_5ForCausalLM, tmp_path, **DELTA, vocab_size=2048)
    answer = "the quick brown fox jumps over the lazy dog"
    params = SamplingParams(max_tokens=64, structured_outputs={"choice": [answer]})
    with LLM(tmp_path, tokenizer="tiny-qwen3", device="cpu") as llm:
        (output,) = llm.generate("Which?", params, use_tqdm=False)
    assert output.outputs[0].text == answer


def test_draft_tokens_of_an_extension_are_rejected(path: Path) -> None:
    class Guesses(Extension):
        def extend_plan(self, plan: Plan) -> None:
            for index in range(len(plan.rows)):
                add_draft_tokens(llm.engine.scheduler, plan, index, [1, 2])

    with LLM(path, **OPTIONS) as llm:
        llm.engine.add_extension(Guesses())
        with pytest.raises(ValueError, match="draft tokens, but the model has recurrent states"):
            llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)


def test_a_draft_model_has_no_states(path: Path, checkpoint: Path) -> None:
    drafts = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r"the draft model .* has recurrent states"):
        LLM(checkpoint, **OPTIONS, speculative_config=drafts)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.size("full")
def test_a_registered_model_may_have_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.MODELS, "_entries", registry.MODELS.entries())
    model = make_checkpoint(Qwen3_5ForCausalLM, tmp_path, **DELTA)
    edit_json(tmp_path / "config.json", architectures=["OwnForCausalLM"])
    registry.register_model("OwnForCausalLM", "nanoserve.models.qwen3_5:Qwen3_5ForCausalLM")
    with LLM(tmp_path, **OPTIONS) as llm:
        assert_like(model, llm)


def test_tensors_for_other_purposes_are_not_read(
    made: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model = make_checkpoint(Qwen3_5ForCausalLM, tmp_path, **DELTA)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.layers.0.norm.weight": torch.ones(48)}, file)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert_like(model, llm)


@pytest.mark.size("full")
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=str)
def test_experts_may_be_stored_as_one_stack(options: dict[str, Any], tmp_path: Path) -> None:
    if options:
        pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
    model = make_checkpoint(Qwen3_5MoeForCausalLM, tmp_path, **DELTA_MOE)
    expected = greedy(tmp_path, PROMPTS, **options)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{e}.{name}.weight") for e in range(6)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{prefix}.down_proj"] = down
    save_file(tensors, file)
    assert greedy(tmp_path, PROMPTS, **options) == expected
    with LLM(tmp_path, **OPTIONS | options) as llm:  # so does transformers, in a trainer
        llm.update_weights(model)
        outputs = llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    tensors[f"{prefix}.down_proj"] = down[:5]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"experts.down_proj is \[5, 48, 24\], not \[6, 48, 24\]"):
        LLM(tmp_path, **OPTIONS)
