"""Tensor parallelism with real worker processes gives the answers of one process.

On a CPU with gloo; where there are GPUs enough, `pytest -m gpu` runs the same with NCCL.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared_engine import SharedEngine
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.features.parallel.process_group import Group
from nanoserve.outputs import RequestOutput

COMMON: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, **COMMON),
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=0.8, seed=3, n=2, **COMMON),
    SamplingParams(temperature=0, repetition_penalty=1.4, logit_bias={5: 3.0}, **COMMON),
]


needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpus])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make_llm(path: Path | str, size: int, device: str, **options: Any) -> LLM:
    if device == "cuda" and size > torch.cuda.device_count():
        pytest.skip(f"needs {size} NVIDIA GPUs")
    common = {"dtype": "float32", "device": device, "skip_tokenizer_init": True}
    return LLM(path, tensor_parallel_size=size, **common | options)


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedEngine]:
    """`make_llm`, for tests after which the engine goes on."""
    shared = SharedEngine(make_llm)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose only KV head both ranks have."""
    folder = tmp_path_factory.mktemp("one_kv_head")
    make_qwen3(folder, num_key_value_heads=1)
    return folder


# Prompts come in chunks, and sequences that run together have no room for all their tokens.
TINY_POOL = {"num_kv_blocks": 7, "max_model_len": 64, "max_num_batched_tokens": 24}
SHARED = {"max_num_seqs": 5, "async_scheduling": True, **TINY_POOL}


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Of 1 to 37 tokens; some begin alike."""
    return [[(j * j + (i % 4)) % vocab_size for j in range(1 + 9 * i % 37)] for i in range(count)]


def logprobs_of(output: RequestOutput) -> torch.Tensor:
    """Every log-probability of a completion and its prompt."""
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([entry.logprob for position in positions for entry in position.values()])


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        if a.prompt_logprobs is not None:
            torch.testing.assert_close(logprobs_of(a), logprobs_of(b), rtol=1e-4, atol=1e-4)


@pytest.mark.small(options=[SHARED])
@pytest.mark.parametrize(
    ("size", "overrides", "options"),
    [
        (2, {}, {}),
        (2, {"vocab_size": 301, "tie_word_embeddings": True}, {"max_num_batched_tokens": 16}),
        (2, {"num_key_value_heads": 1}, {"num_kv_blocks": 7, "max_model_len": 64}),
        (2, {"num_key_value_heads": 1}, SHARED),
        (4, {"num_key_value_heads": 2, "vocab_size": 297}, {"block_size": 4}),
        pytest.param(
            4,
            {"num_key_value_heads": 4, "num_attention_heads": 8},
            {"num_kv_blocks": 7, "max_model_len": 64},
            marks=pytest.mark.size("soak"),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_together_answer_as_one_does(
    tmp_path: Path,
    path: Path,
    shared: SharedEngine,
    device: str,
    size: int,
    overrides: dict[str, Any],
    options: dict[str, Any],
) -> None:
    if options is not SHARED:
        path = tmp_path
        make_qwen3(path, **overrides)
    asked = prompts(12, overrides.get("vocab_size", 300))
    params = [PARAMS[i % len(PARAMS)] for i in range(len(asked))]
    options = {"max_num_seqs": 5} | options
    with make_llm(path, 1, device, **options) as llm:
        expected = llm.generate(asked, params, use_tqdm=False)
    llm = shared(path, size, device, **options)
    before = llm.stats
    assert_same(llm.generate(asked, params, use_tqdm=False), expected)
    again = llm.generate(asked, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]
    assert llm.stats.prefix_cache_hits > before.prefix_cache_hits
    assert llm.stats.num_preemptions > before.num_preemptions or "num_kv_blocks" not in options
    if "num_kv_blocks" not in options:  # on a GPU its pool is all the memory
        shared.close()


def raise_at_the_third(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_token_ids) == 2:
        raise ZeroDivisionError("no such luck")
    return logits


@pytest.mark.size("full")
@pytest.mark.parametrize("options", [{}, TINY_POOL], ids=["ample", "tiny"])
def test_one_step_ahead_two_ranks_answer_as_they_do_without(
    path: Path, shared: SharedEngine, device: str, options: dict[str, Any]
) -> None:
    """Tokens that only rank 0 has are the other's input, and one request's processor fails."""
    asked = prompts(14, 300)
    failing = SamplingParams(temperature=0, logits_processors=[raise_at_the_third], **COMMON)
    stopping = SamplingParams(temperature=0, stop_token_ids=[*range(0, 300, 5)], max_tokens=20)
    kinds = [*PARAMS, failing, stopping]
    params = [kinds[i % len(kinds)] for i in range(len(asked))]
    answers: dict[bool, list[RequestOutput]] = {}
    for async_scheduling in (False, True):
        make = shared if async_scheduling else make_llm
        ahead = {"async_scheduling": async_scheduling, "max_num_seqs": 5}
        llm = make(path, 2, device, **ahead, **options)
        before, pending = llm.stats.num_preemptions, []
        llm.engine.observers.append(
            lambda plan, batch, result, times, pending=pending: pending.append(
                batch.header.num_pending
            )
        )
        answers[async_scheduling] = llm.generate(asked, params, use_tqdm=False)
        assert any(pending) is async_scheduling
        assert (llm.stats.num_preemptions > before) is bool(options)
        if make is make_llm:
            llm.close()
    if not options:  # on a GPU its pool is all the memory
        shared.close()
    assert_same(answers[True], answers[False])
    for outputs in answers.values():
        errors = [output.error for output in outputs]
        assert [error is not None for error in errors] == [p is failing for p in params]
        assert all(isinstance(error, ZeroDivisionError) for error in errors if error is not None)
        reasons = {c.finish_reason for o in outputs if o.error is not None for c in o.outputs}
        assert reasons == {"error"}


@pytest.mark.size("full")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_model_that_computes_nan_ends_whom_it_concerns_and_no_rank(
    tmp_path: Path, device: str, async_scheduling: bool
) -> None:
    """One token's embedding is broken, the first of a rank's part, and what is no token is nobody's
    input."""
    make_qwen3(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][150] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    asked = [[5, 6], [150, 6], [7] * 20, [8, 150]]
    kinds = [PARAMS[1], PARAMS[0], PARAMS[2], PARAMS[1]]
    with make_llm(tmp_path, 2, device, async_scheduling=async_scheduling) as llm:
        outputs = llm.generate(asked, kinds, use_tqdm=False)
        again = llm.generate(asked[::2], kinds[::2], use_tqdm=False)
    for output, fails in zip(outputs, (False, True, False, True), strict=True):
        assert isinstance(output.error, FloatingPointError) is fails
        reasons = {completion.finish_reason for completion in output.outputs}
        assert reasons == {"error" if fails else "length"}
    assert_same(again, outputs[::2])


@pytest.mark.size("full")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_log_probabilities_of_prompts_are_made_by_all_ranks_and_read_on_the_first(
    path: Path, shared: SharedEngine, device: str, async_scheduling: bool
) -> None:
    """Of prompts in several chunks, longer than a slice of logits, beside prompts without."""
    asked = prompts(9, 300)
    with_logprobs = [
        SamplingParams(temperature=0, prompt_logprobs=k, logprobs=1, max_tokens=4, ignore_eos=True)
        for k in (0, 3)
    ]
    kinds = [*with_logprobs, PARAMS[1]]
    params = [kinds[i % 3] for i in range(len(asked))]
    options = SHARED | {"async_scheduling": async_scheduling}
    with make_llm(path, 1, device, **options) as llm:
        expected = llm.generate(asked, params, use_tqdm=False)
    llm = shared(path, 2, device, **options)
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert_same(outputs, expected)
    for prompt, p, output in zip(asked, params, outputs, strict=True):
        if p.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            first, *rest = output.prompt_logprobs
            assert first is None and len(rest) == len(prompt) - 1
            assert all(
                token in entry and p.prompt_logprobs <= len(entry) <= p.prompt_logprobs + 1
                for token, entry in zip(prompt[1:], rest, strict=True)
            )


@pytest.mark.size("full")
def test_the_bundled_model_on_two_ranks(device: str) -> None:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    greedy = SamplingParams(temperature=0, max_tokens=60)
    texts = []
    for size in (1, 2):
        with make_llm("tiny-qwen3", size, device, skip_tokenizer_init=False) as llm:
            texts.append(llm.chat(question, greedy, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1] != ""


def test_all_ranks_read_the_config_with_its_overrides(path: Path, device: str) -> None:
    answers = []
    for size, theta in ((1, 1e4), (1, 50.0), (2, 50.0)):
        with make_llm(path, size, device, hf_overrides={"rope_theta": theta}) as llm:
            outputs = llm.generate([[*range(40)]], PARAMS[1], use_tqdm=False)
        answers.append(outputs[0].outputs[0].token_ids)
    assert answers[0] != answers[1] == answers[2]


@pytest.mark.size("full")
def test_two_engines_at_once_and_their_streams(checkpoint: Path, device: str) -> None:
    asked, share = prompts(3, 300), {"gpu_memory_utilization": 0.3}
    with make_llm(checkpoint, 1, device, **share) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(asked, PARAMS[1], use_tqdm=False)]
    first, second = (make_llm(checkpoint, 2, device, **share) for _ in range(2))
    with first, second:
        for prompt, tokens in zip(asked, expected, strict=True):
            streams = [llm.stream(prompt, PARAMS[1]) for llm in (first, second)]
            pieces: list[list[int]] = [[], []]
            for deltas in zip(*streams, strict=True):
                for got, delta in zip(pieces, deltas, strict=True):
                    got += delta.outputs[0].token_ids
            assert pieces == [tokens, tokens]


@pytest.mark.size("full")
def test_ten_engines_one_after_the_other(
    checkpoint: Path, device: str, by_size: Callable[..., int]
) -> None:
    threads = torch.get_num_threads()
    pids, count = set(), by_size(2, 4, 10)
    for _ in range(count):
        with make_llm(checkpoint, 2, device) as llm:
            pids |= set(llm.engine.executor.worker_pids)
            assert len(llm.generate([1, 2], PARAMS[1], use_tqdm=False)[0].outputs[0].token_ids) == 8
        llm.close()  # once more does nothing
    assert len(pids) == count and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert torch.get_num_threads() == threads


@pytest.mark.size("full")
def test_an_engine_that_nobody_holds_ends_its_workers(checkpoint: Path, device: str) -> None:
    llm = make_llm(checkpoint, 2, device)
    (pid,) = llm.engine.executor.worker_pids
    del llm
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.size("full")
def test_a_layer_costs_two_all_reduces(
    path: Path, shared: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    for name in ("all_reduce", "gather"):
        inner = getattr(Group, name)

        def counted(self: Group, x: torch.Tensor, inner=inner, name=name) -> Any:
            calls[name] += 1
            return inner(self, x)

        monkeypatch.setattr(Group, name, counted)
    llm = shared(path, 2, "cpu", **SHARED)
    before = llm.stats.num_steps
    calls.clear()
    llm.generate([1, 2, 3], PARAMS[1], use_tqdm=False)
    num_steps = llm.stats.num_steps - before
    num_layers = llm.engine.model_config.num_hidden_layers
    # One more for the embedding, which is split along the vocabulary.
    assert calls == {"all_reduce": num_steps * (2 * num_layers + 1), "gather": num_steps}


@pytest.mark.parametrize(
    ("overrides", "size", "message"),
    [
        ({}, 3, "num_attention_heads=4 must be a multiple of tensor_parallel_size=3"),
        ({"intermediate_size": 82}, 4, "82"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_key_value_heads=3"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, int], size: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process"))
    make_qwen3(tmp_path, **overrides)
    with pytest.raises(ValueError, match=message):
        make_llm(tmp_path, size, "cpu")
