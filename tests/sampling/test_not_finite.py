"""Where nothing can be chosen, because logits are NaN or infinite or every token is forbidden.

That request ends with an error that says why; nobody else notices.
"""

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting_executor import byte_tokenizer
from fake_cuda import FakeCuda
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import SlotUpdate
from nanoserve.engine.guard import GuardedEngine
from nanoserve.models.layers.context import LayerContext
from nanoserve.sampling import prompt_logprobs
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling.sampler import Sampled, Sampler, best_tokens
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

# In the interpreter of the GPU's kernels numpy computes, and warns of what a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf

# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 1023, 1024, 1025, 1500, 2047, 2048, 2500])
def test_one_bad_logit_anywhere_leaves_no_best_token(vocab_size: int, dtype: torch.dtype) -> None:
    """Also where the last chunk of the vocabulary overlaps the one before."""
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    places = range(0, vocab_size, 1 + vocab_size // 200)
    for bad in (NAN, INF):
        logits = row.repeat(len(places) + 1, 1)
        logits[range(len(places)), places] = bad
        *spoilt, healthy = best_tokens(logits).tolist()
        assert spoilt == [-1] * len(places) and healthy == row.argmax()
    empty = torch.full((2, vocab_size), -INF, dtype=dtype)
    empty[1, -1] = -1e4
    assert best_tokens(empty).tolist() == [-1, vocab_size - 1]


VOCAB_SIZE = 1100
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, logprobs": {"temperature": 0, "logprobs": 2},
    "drawn": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 5, "logprobs": 0},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1.0},
    "changed": {"temperature": 0, "logit_bias": {7: 3.0}, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("sampler_class", [Sampler, FusedSampler])
def test_a_bad_row_gets_no_token_and_its_neighbours_get_theirs(
    sampler_class: type[Sampler],
) -> None:
    """Every kind of row, healthy beside one with NaN, one with infinity and one that is empty."""
    kinds = [kind for kind in KINDS.values() for _ in range(4)]
    sampler = sampler_class(len(kinds), VOCAB_SIZE, CPU)
    for slot, settings in enumerate(kinds):
        params = SamplingParams(**settings)
        sampler.set_slot(SlotUpdate(slot, params, seed=slot, output_token_ids=[3, 4]))
    healthy = 3 * torch.randn(len(kinds), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    spoilt = healthy.clone()
    spoilt[1::4, 1050] = NAN
    spoilt[2::4, 0] = INF
    spoilt[3::4] = -INF

    def sample(logits: torch.Tensor) -> Sampled:
        slots, before = np.arange(len(kinds), dtype=np.int32), logits.clone()
        sampled = sampler.sample(logits, slots, slots + 9)
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
        return sampled

    expected, sampled = sample(healthy), sample(spoilt)
    assert (expected.token_ids >= 0).all()
    assert sampled.token_ids[::4].tolist() == expected.token_ids[::4].tolist()
    is_bad = np.arange(len(kinds)) % 4 > 0
    assert (sampled.token_ids[is_bad] == -1).all() and sampled.errors == {}
    asked = [row for row, settings in enumerate(kinds) if "logprobs" in settings]
    for index, row in enumerate(asked):
        assert sampled.logprobs.logprobs[index, 0].isnan() == is_bad[row]
        if not is_bad[row]:
            ours, theirs = (s.logprobs.logprobs[index] for s in (sampled, expected))
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_what_a_mask_hides_harms_nobody_but_those_who_ask_for_log_probabilities() -> None:
    """Of the model's own distribution, which there is none of."""
    sampler = Sampler(2, 50, CPU)
    for slot in range(2):
        settings = {"allowed_token_ids": [3, 4], "logprobs": slot or None, "temperature": 0}
        sampler.set_slot(SlotUpdate(slot, SamplingParams(**settings), seed=0))
    logits, slots = torch.arange(50.0).repeat(2, 1), np.arange(2)
    logits[:, 40] = NAN
    assert sampler.sample(logits, slots, slots).token_ids.tolist() == [4, -1]


# ---------------------------------------------------------------- requests


def make_engine(path: Path, device: str, async_scheduling: bool, **options: Any) -> GuardedEngine:
    """With the CPU's sampler, or with a GPU's, whose kernels are interpreted."""
    options = {"num_kv_blocks": 40, "max_num_seqs": 6, "max_model_len": 64} | options
    config = EngineConfig(str(path), async_scheduling=async_scheduling, **options)
    config = config.for_device("cpu" if device == "cpu" else "cuda")
    model_config = ModelConfig.from_checkpoint(path)
    if device == "cpu":
        llm = LLM(path, skip_tokenizer_init=True, async_scheduling=async_scheduling, **options)
        runner = llm.engine.executor
    else:
        context = LayerContext(attention=TorchAttention())
        cuda_device = CudaDevice(config, FakeCuda(), is_capturable=True)
        runner = ModelRunner.load(config, model_config, path, context, cuda_device)
    return GuardedEngine(config, model_config, runner, byte_tokenizer())


def run(
    engine: GuardedEngine, requests: list[tuple[list[int], SamplingParams]]
) -> list[RequestOutput]:
    """All of them together; afterwards everything is given back."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    engine.scheduler.check()
    assert engine.scheduler.block_manager.num_free_blocks == engine.executor.num_kv_blocks
    assert not engine.output_processor.requests
    return [done[str(i)] for i in range(len(requests))]


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **settings})


def seeded(**settings: Any) -> SamplingParams:
    return greedy(temperature=0.9, seed=5, **settings)


def returning(value: float) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """From the third token on, these logits and no others."""

    def processor(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert all(0 <= token_id < len(logits) for token_id in output_token_ids)
        return torch.full_like(logits, value) if len(output_token_ids) >= 2 else logits

    return processor


NEIGHBOURS = [
    ([9, 8, 7], greedy(logprobs=1)),
    ([1, 2], seeded(top_p=0.9)),
    ([3] * 20, seeded(repetition_penalty=1.2)),
]
AHEAD = pytest.mark.parametrize("async_scheduling", [False, True])


def assert_ends_alone(
    engine: GuardedEngine, prompt: list[int], params: SamplingParams, num_tokens: int
) -> Exception:
    """With this error, and so many tokens; in the midst of neighbours that get their own."""
    alone = run(engine, NEIGHBOURS)
    first, *some = NEIGHBOURS
    failed, *others = run(engine, [(prompt, params), first, (prompt, params), *some])
    again = others.pop(1)
    for output in (failed, again):
        assert output.finished and type(output.error) is type(failed.error)
        for completion in output.outputs:
            assert completion.finish_reason == "error"
            assert len(completion.token_ids) == num_tokens
            if params.logprobs is not None:
                assert len(completion.logprobs or []) == num_tokens
    for output, expected in zip(others, alone, strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 8
    return failed.error


CONTRADICTIONS: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"allowed_token_ids": [65], "bad_words": ["A"]}, 0, ["allowed_token_ids=[65]", "['A']"]),
    ({"allowed_token_ids": [65, 66], "bad_words": ["AAA", "AAB"], "logit_bias": {65: 100}}, 2, []),
    (
        {"min_tokens": 5, "allowed_token_ids": [7], "stop_token_ids": [7]},
        0,
        ["min_tokens=5", "allowed_token_ids=[7]"],
    ),
    ({"logits_processors": [returning(NAN)]}, 2, ["logits_processors=[<function returning"]),
    ({"logits_processors": [returning(INF)], "logprobs": 2}, 2, []),
    ({"logits_processors": [returning(-INF)], "frequency_penalty": 0.5}, 2, ["frequency_penalty"]),
]


@pytest.mark.small(async_scheduling=[True])
@AHEAD
@pytest.mark.parametrize(("settings", "num_tokens", "said"), CONTRADICTIONS, ids=lambda case: "")
@pytest.mark.parametrize("kind", [greedy, seeded])
def test_a_request_that_leaves_itself_no_token_ends_with_an_error_that_says_so(
    checkpoint: Path,
    async_scheduling: bool,
    settings: dict[str, Any],
    num_tokens: int,
    said: list[str],
    kind: Callable[..., SamplingParams],
) -> None:
    with closing(make_engine(checkpoint, "cpu", async_scheduling)) as engine:
        error = assert_ends_alone(engine, [5, 6, 7], kind(**settings), num_tokens)
    assert isinstance(error, ValueError) and "no token can be chosen after" in str(error)
    assert all(text in str(error) for text in said), error
    assert len(str(error)) < 400


@pytest.mark.small(async_scheduling=[False])
@AHEAD
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        greedy(logprobs=2, prompt_logprobs=1),
        seeded(top_k=9, top_p=0.9, min_p=0.01),
        seeded(n=2, presence_penalty=0.5),
        greedy(allowed_token_ids=[5, 6]),
    ],
    ids=["greedy", "logprobs", "filtered", "n=2", "allowed_token_ids"],
)
def test_a_model_that_computes_nan_ends_whom_it_concerns(
    checkpoint: Path, async_scheduling: bool, bad: float, params: SamplingParams
) -> None:
    """One row of its embedding is broken, and one request's prompt has this token."""
    with closing(make_engine(checkpoint, "cpu", async_scheduling)) as engine:
        weight = engine.executor.model.model.embed_tokens.weight
        weight[250, 3] = bad
        error = assert_ends_alone(engine, [250, 6, 7], params, 0)
    assert isinstance(error, FloatingPointError)


def test_a_gpus_sampler_ends_the_same_requests(checkpoint: Path) -> None:
    """Its kernels, interpreted, one step ahead: what is no token must not become an input."""
    kinds = [
        ([250, 6], greedy(max_tokens=3)),
        ([5, 6], greedy(max_tokens=3)),
        ([250, 7], seeded(max_tokens=3, top_k=9, logprobs=1)),
        ([7, 6], seeded(max_tokens=3)),
        ([8, 6], seeded(max_tokens=3, logits_processors=[returning(NAN)])),
    ]
    answers = []
    for device in ("cpu", "gpu"):
        with closing(make_engine(checkpoint, device, async_scheduling=True)) as engine:
            engine.executor.model.model.embed_tokens.weight[250, 3] = NAN
            outputs = run(engine, kinds)
        errors = [type(output.error) for output in outputs]
        none = type(None)
        assert errors == [FloatingPointError, none, FloatingPointError, none, ValueError]
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert [len(token_ids) for token_ids in answers[0]] == [0, 3, 0, 3, 2]


def test_a_stream_raises_it(checkpoint: Path) -> None:
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        pieces, params = [], greedy(logits_processors=[returning(NAN)])
        with pytest.raises(ValueError, match="logits_processors"):
            for output in llm.stream([5, 6], params):
                pieces += output.outputs[0].token_ids
        assert len(pieces) == 2
        assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_a_processor_of_the_engine_spoils_ends_and_nothing_else_does(
    checkpoint: Path, value: float
) -> None:
    def spoil_the_second(logits: torch.Tensor, states: list[Any]) -> None:
        for row, state in enumerate(states):
            if state.prompt_token_ids == [5, 6] and len(state.output_token_ids) == 3:
                logits[row] = value

    options = {"skip_tokenizer_init": True, "logits_processors": [spoil_the_second]}
    with LLM(checkpoint, **options) as llm:
        first, second = llm.generate([[7, 8], [5, 6]], greedy(), use_tqdm=False)
    assert len(first.outputs[0].token_ids) == 8 and first.error is None
    assert len(second.outputs[0].token_ids) == 3
    assert second.outputs[0].finish_reason == "error"
    assert "after logits_processors of the engine:" in str(second.error)


def test_a_temperature_that_takes_logits_beyond_float32_is_told_from_a_broken_model(
    checkpoint: Path,
) -> None:
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        head = llm.engine.executor.model.lm_head
        own = head.form
        head.form = lambda x: own(x) * 1e33
        greedy_one, cold = llm.generate([[5], [5]], [greedy(), seeded()], use_tqdm=False)
        assert greedy_one.error is None and cold.error is None
        tiny = SamplingParams(temperature=2e-5, seed=1)
        head.form = lambda x: own(x) * 1e35
        (cold,) = llm.generate([[5]], tiny, use_tqdm=False)
    assert "the model's largest logit is" in str(cold.error)
    assert "divided by the temperature" in str(cold.error)


# ---------------------------------------------------------------- log-probabilities, and beams


@pytest.mark.small(async_scheduling=[True], chunk=[4, 64], place=[1, 7])
@AHEAD
@pytest.mark.parametrize("chunk", [4, 7, 64])
@pytest.mark.parametrize("place", [1, 6, 7])
def test_a_prompt_without_log_probabilities_ends_its_request(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: int,
    chunk: int,
    async_scheduling: bool,
) -> None:
    """In the middle of its prompt, or in the chunk that yields the first token."""
    gather = prompt_logprobs.gather_logprobs

    def spoilt(logits: torch.Tensor, token_ids: torch.Tensor, *numbers: Any) -> Any:
        return gather(logits.masked_fill((token_ids == 250).unsqueeze(1), NAN), token_ids, *numbers)

    monkeypatch.setattr(prompt_logprobs, "gather_logprobs", spoilt)
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]
    neighbours = [(prompt, greedy(prompt_logprobs=2)), *NEIGHBOURS]
    prompt = [*prompt[:place], 250, *prompt[place + 1 :]]
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": 4}
    for params in (greedy(prompt_logprobs=1), seeded(prompt_logprobs=0, n=2)):
        with closing(make_engine(checkpoint, "cpu", async_scheduling, **options)) as engine:
            alone = run(engine, neighbours)
            failed, *others = run(engine, [(prompt, params), *neighbours])
        assert isinstance(failed.error, FloatingPointError)
        assert f"token {place} of the prompt" in str(failed.error)
        assert {completion.finish_reason for completion in failed.outputs} == {"error"}
        assert len(failed.prompt_logprobs) == place
        for output, expected in zip(others, alone, strict=True):
            assert output.error is None
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_beams_of_a_broken_model_raise_and_leave_nothing_behind(checkpoint: Path) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        healthy = llm.beam_search([[5, 6]], params)
        weight = llm.engine.executor.model.model.embed_tokens.weight
        weight[250, 0] = NAN
        with pytest.raises(FloatingPointError, match="no token can be chosen"):
            llm.beam_search([[5, 6], [250, 6]], params)
        assert not llm.engine.has_unfinished_requests()
        assert llm.beam_search([[5, 6]], params) == healthy
        weight[healthy[0].sequences[0].tokens[2]] = NAN  # where a beam comes by
        with pytest.raises(FloatingPointError, match="no token can be chosen"):
            llm.beam_search([[7, 5, 6], [5, 6]], params)


# ---------------------------------------------------------------- checkpoints


def fill(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: [weight.fill_(value) for weight in weights.values()] and None


def put(name: str, index: int, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights[name].view(-1).__setitem__(index, value)


HUGE = fill(1e38)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "is_broken"),
    [
        (lambda weights: weights[Q_PROJ].fill_(NAN), True),
        (put(Q_PROJ, 5, NAN), True),
        (put("lm_head.weight", 7 * 48 + 3, NAN), True),
        (put("model.norm.weight", 0, INF), True),
        (HUGE, True),
        (fill(0.0), False),
        (lambda weights: weights["lm_head.weight"].zero_(), False),
    ],
    ids=["NaN matrix", "one NaN", "NaN head", "infinite norm", "1e38", "all zero", "zero head"],
)
@pytest.mark.small(dtype=["float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_answers_rightly_or_not_at_all(
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    is_broken: bool,
    dtype: str,
) -> None:
    make_qwen3(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    kinds = [greedy(), greedy(logprobs=1, prompt_logprobs=1), seeded(top_p=0.9, min_tokens=2)]
    with LLM(tmp_path, skip_tokenizer_init=True, dtype=dtype, num_kv_blocks=20) as llm:
        outputs = llm.generate([[5, 6, 7]] * 3, kinds, use_tqdm=False)
    if change is HUGE:  # the norm of infinite squares is 0 with some processors, NaN with others
        assert all(o.error is None or isinstance(o.error, FloatingPointError) for o in outputs)
        return
    for output in outputs:
        assert isinstance(output.error, FloatingPointError) is is_broken
        (completion,) = output.outputs
        assert completion.finish_reason == ("error" if is_broken else "length")
        assert len(completion.token_ids) == (0 if is_broken else 8)
    if not is_broken:  # all tokens are equally likely, and greedy takes the first
        assert outputs[1].outputs[0].token_ids == [0] * 8
        assert outputs[1].outputs[0].cumulative_logprob == pytest.approx(-8 * math.log(300))
