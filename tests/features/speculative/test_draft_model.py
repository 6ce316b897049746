"""A draft model beside the target, on the target's block tables.

If it is the target's own checkpoint, every draft token must be accepted, in float32: it has the
same noise, and if its K and V are those of the tokens that came, the same logits. A rejected one
shows that something was missing in its cache, or written over.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from proposers import speculation_of
from safetensors.torch import load_file
from tiny_checkpoints import GEMMA3, make_checkpoint, make_qwen3
from transformers import Gemma3ForCausalLM, MistralForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.engine.executor import SecondModelMemory
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.engine.sequence_room import SequenceRoom
from nanoserve.features.speculative.draft_model import DraftModelProposer, prepare_draft_model
from nanoserve.worker.backend_checks import check_kernels

VOCAB_SIZE = 512
FIRST_SEED = 7  # a life in which a sequence is preempted, which only some are
FIRST_SEED_WITH_WINDOWS = 19  # another one


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_qwen3(path, vocab_size=VOCAB_SIZE)
    return path


def drafting(path: Path) -> dict[str, Any]:
    """Return the options of an engine with this draft model."""
    draft = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4}
    return {"skip_tokenizer_init": True, "speculative_config": draft | {"adaptive": False}}


def life(path: Path, seed: int, windows: AbstractSequence[int] = ()) -> dict[str, int]:
    """Requests that come and go in a tiny pool, with shared beginnings, and some plain steps.

    `windows` are those of the model's groups of layers behind the first.
    """
    rng = random.Random(seed)
    block_size = rng.choice([2, 4, 8])
    num_spare_blocks = rng.choice([0, 3, 96 // block_size])
    options = {
        "block_size": block_size,
        "max_model_len": 96,
        "max_num_seqs": rng.choice([1, 2, 4]),
        "max_num_batched_tokens": rng.choice([8, 32, 200]),
        "async_scheduling": rng.random() < 0.3,
        "attention_backend": rng.choice(["torch", "numba"]),
    }
    room = SequenceRoom((None, *windows), block_size, options["max_num_batched_tokens"])
    options["num_kv_blocks"] = room.num_blocks(96) + num_spare_blocks * (1 + len(windows))
    with LLM(path, **drafting(path), **options) as llm:
        assert llm.engine.scheduler.block_manager.windows == (None, *windows)
        engine, beginning = llm.engine, [rng.randrange(VOCAB_SIZE) for _ in range(40)]
        for number in range(8):
            prompt = beginning[: rng.randint(0, 40)]
            prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
            params = SamplingParams(
                temperature=rng.choice([0, 0.8]),
                top_p=rng.choice([1, 0.9]),
                seed=number,
                max_tokens=rng.randint(5, 30),
                ignore_eos=True,
            )
            engine.add_request(str(number), prompt, params)
            for _ in range(rng.randint(0, 6)):
                engine.step()
                engine.scheduler.check()
            if rng.random() < 0.1:
                engine.abort_request(str(rng.randint(0, number)))
            # Now and then nothing is drafted for a while, and the draft model falls behind.
            speculation_of(llm)._most = rng.choice([0, 4, 4, 4])
        speculation_of(llm)._most = 4
        while engine.has_unfinished_requests():
            engine.step()
        stats = llm.stats
    return {
        "draft tokens": stats.num_draft_tokens,
        "wrong": stats.num_draft_tokens - stats.num_accepted_tokens,
        "preempted": stats.num_preemptions,
        "hits": stats.prefix_cache_hits,
    }


def lives(path: Path, seeds: range, windows: AbstractSequence[int] = ()) -> dict[str, int]:
    runs = [life(path, seed, windows) for seed in seeds]
    return {name: sum(run[name] for run in runs) for name in runs[0]}


def test_a_draft_that_is_the_target_is_always_right(
    path: Path, by_size: Callable[..., int]
) -> None:
    num_lives = by_size(4, 40, 200)
    found = lives(path, range(FIRST_SEED, FIRST_SEED + num_lives))
    print(found)
    assert found["wrong"] == 0
    assert found["draft tokens"] > 40 * num_lives and found["preempted"] and found["hits"], found


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    make_checkpoint(Gemma3ForCausalLM, path, vocab_size=VOCAB_SIZE, **GEMMA3)
    return path


def test_a_draft_beside_a_target_with_windows_is_always_right(
    gemma3: Path, by_size: Callable[..., int]
) -> None:
    """It lies in the blocks of the first group, which gives none back."""
    num_lives = by_size(3, 20, 100)
    first = FIRST_SEED_WITH_WINDOWS
    found = lives(gemma3, range(first, first + num_lives), windows=(9, 9))
    assert found["wrong"] == 0
    assert found["draft tokens"] > 40 * num_lives and found["preempted"] and found["hits"], found


@pytest.mark.parametrize(
    ("architecture", "settings", "windows", "with_draft"),
    [
        (Gemma3ForCausalLM, GEMMA3, (None, 9, 9), (None, 9, 9)),
        # All layers have the window: the draft needs what is behind it, so nothing is given back.
        (MistralForCausalLM, {"sliding_window": 9}, (9,), (None,)),
    ],
    ids=["gemma3", "mistral"],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_windows_and_a_draft_of_another_kind_give_the_same_tokens(
    architecture: Any,
    settings: dict[str, Any],
    windows: tuple[int | None, ...],
    with_draft: tuple[int | None, ...],
    is_async: bool,
    path: Path,
    tmp_path: Path,
) -> None:
    make_checkpoint(architecture, tmp_path, vocab_size=VOCAB_SIZE, **settings)
    rng = random.Random(0)
    beginning = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [[*beginning[:length], length] for length in (40, 33, 20, 8, 0, 40)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30, ignore_eos=True)
        for i in range(len(prompts))
    ]
    options = {"block_size": 4, "max_num_seqs": 3, "async_scheduling": is_async}
    found = []
    for more, expected in (({"skip_tokenizer_init": True}, windows), (drafting(path), with_draft)):
        with LLM(tmp_path, **options, **more) as llm:
            assert llm.engine.scheduler.block_manager.windows == expected
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            num_draft_tokens = llm.stats.num_draft_tokens
    assert found[0] == found[1] and num_draft_tokens > 100


def test_a_copy_of_a_block_is_not_taken_for_what_the_block_held_before(path: Path) -> None:
    """A block that holds a prefix, then something else, and then the same prefix once more."""
    prompt, answer = [*range(9)], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    # To compute all outputs of a prompt is to have it in blocks of one's own.
    copies = replace(answer, prompt_logprobs=0)
    short = replace(answer, max_tokens=3)  # fills no block
    requests = [(prompt, answer), (prompt, copies), ([100], short), (prompt, copies)]
    used = []
    with LLM(path, block_size=4, num_kv_blocks=64, **drafting(path)) as llm:
        engine, cache = llm.engine, llm.engine.scheduler.block_manager.prefix_cache
        for token_ids, params in requests:
            engine.add_request("r", token_ids, params)
            engine.step()
            (seq,) = engine.scheduler.running
            used.append((seq.block_table[0], cache.number_of(seq.block_table[0])))
            while engine.has_unfinished_requests():
                engine.step()
        stats = llm.stats
    (first, _), (block, number), (other_block, _), (block_again, number_again) = used
    assert first != block == other_block == block_again and number and number_again
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 10


def last_draft_counts_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was no input: its K and V are missing when all draft tokens are accepted."""
    propose = DraftModelProposer.propose

    def propose_and_note(self: Any, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        proposed = propose(self, wanted)
        for (seq, _), own in zip(wanted, proposed, strict=True):
            if own:
                self._computed[seq] = (len(seq.token_ids), own)
        return proposed

    monkeypatch.setattr(DraftModelProposer, "propose", propose_and_note)


def cached_prefixes_count_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are, by the target."""
    monkeypatch.setattr(DraftModelProposer, "_has", lambda self, block: True)


def preempted_ones_keep_what_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = DraftModelProposer.begin

    def begin_once(self: Any, seq: Sequence) -> None:
        if seq not in self._computed:
            begin(self, seq)

    monkeypatch.setattr(DraftModelProposer, "begin", begin_once)


@pytest.mark.parametrize(
    "plant",
    [
        last_draft_counts_as_computed,
        cached_prefixes_count_as_computed,
        preempted_ones_keep_what_they_had,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_makes_it_wrong(
    plant: Callable[[pytest.MonkeyPatch], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(life(path, seed)["wrong"] for seed in range(FIRST_SEED, 50))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_it_tells_what_it_will_take_before_it_is_read(
    path: Path, tmp_path: Path, quantization: str | None
) -> None:
    make_qwen3(tmp_path, vocab_size=VOCAB_SIZE, num_hidden_layers=1, head_dim=32)
    chosen = {"method": "draft_model", "model": str(tmp_path), "quantization": quantization}
    config = EngineConfig(str(path), speculative_config=chosen, block_size=8).for_device("cpu")
    proposer = prepare_draft_model(config, ModelConfig.from_checkpoint(path))
    weights = load_file(tmp_path / "model.safetensors")
    numbers = sum(weight.numel() for weight in weights.values())
    of_linears = sum(weight.numel() for name, weight in weights.items() if "_proj" in name)
    expected = 4 * numbers - (3 * of_linears if quantization else 0)
    assert proposer.second_model_memory() == SecondModelMemory(
        expected, block_bytes=2 * 2 * 32 * 4 * 8
    )


def test_it_has_the_kernels_of_the_model_but_for_those_of_quantized_activations(path: Path) -> None:
    kernels = {"fused_quantization": True, "merge_in_attention": True}
    drafts = {"method": "draft_model", "model": str(path)}
    options = {"speculative_config": drafts, "quantization": "fp8", "kernel_config": kernels}
    config = EngineConfig(str(path), **options).for_device("cuda")
    own = prepare_draft_model(config, ModelConfig.from_checkpoint(path)).make.__self__.config
    assert own.quantization is None
    check_kernels(own.kernel_config, "triton", torch.device("cuda"), own.quantization)
    assert own.kernel_config == KernelConfig(merge_in_attention=True)


def test_a_draft_of_another_vocabulary_is_refused(path: Path, tmp_path: Path) -> None:
    make_qwen3(tmp_path, vocab_size=100)
    draft = {"method": "draft_model", "model": str(tmp_path)}
    with pytest.raises(ValueError, match="vocabulary of 100 tokens, but the model has 512"):
        LLM(path, skip_tokenizer_init=True, speculative_config=draft)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "draft_model"}, "method='draft_model' does not match model=None"),
        ({"method": "ngram", "model": "x"}, "method='ngram' does not match model='x'"),
        ({"method": "draft_model", "model": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_a_draft_that_is_not_there_is_refused(
    options: dict[str, Any], message: str, path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(path, skip_tokenizer_init=True, speculative_config=options)


def test_a_shorter_draft_model_drafts_as_far_as_it_reaches(path: Path, tmp_path: Path) -> None:
    make_qwen3(tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=32)
    draft = {"method": "draft_model", "model": str(tmp_path), "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(path, skip_tokenizer_init=True, max_model_len=96) as llm:
        (plain,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    with LLM(path, skip_tokenizer_init=True, max_model_len=96, speculative_config=draft) as llm:
        llm.engine.observers.append(lambda *_: _hold_no_more_than_needed(llm.engine.scheduler))
        (drafted,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert 0 < llm.stats.num_draft_tokens <= 32
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def _hold_no_more_than_needed(scheduler: Scheduler) -> None:
    pool = scheduler.block_manager
    for seq in scheduler.running:
        assert len(seq.block_table) <= pool.blocks_needed(seq.num_tokens)
