"""A head on the target's hidden states, in an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import SecondModelMemory, SlotUpdate
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.head_proposer import (
    DraftRows,
    HeadProposer,
    prepare_hidden_head,
)
from nanoserve.features.speculative.hidden_head import HiddenHead

HIDDEN_SIZE = 192  # of the bundled model
QUESTIONS = ["What is a KV cache?", "Why is decoding slow?", "What is a block table?"]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    HiddenHead.untrained(HIDDEN_SIZE, 8).save(tmp_path / "head.safetensors")
    return tmp_path / "head.safetensors"


def engine(path: Path | str, **options: Any) -> LLM:
    config = {"method": "hidden_head", "model": str(path), "num_speculative_tokens": 3}
    config |= {"adaptive": False}
    return LLM("tiny-qwen3", dtype="float32", speculative_config=config, **options)


def test_it_is_given_the_state_that_the_last_token_came_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happened before: a prompt, accepted draft tokens and rejected ones."""
    num_checked = 0
    propose = HeadProposer.propose

    def checked(self: HeadProposer, wanted: Any) -> Any:
        nonlocal num_checked
        for seq, _ in wanted:
            hidden, row, _ = self._known[seq]
            logits = self._runner.model.compute_logits(hidden[row : row + 1])
            assert logits.argmax() == seq.token_ids[-1]
            num_checked += 1
        return propose(self, wanted)

    monkeypatch.setattr(HeadProposer, "propose", checked)
    messages = [[{"role": "user", "content": text}] for text in [*QUESTIONS, "What is 17 + 45?"]]
    with engine("tiny-qwen3") as llm, torch.inference_mode():
        llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        stats = llm.stats
    assert num_checked > 25 and stats.num_accepted_tokens > 60
    assert stats.num_accepted_tokens < stats.num_draft_tokens


def test_its_answers_are_those_without_it(head: Path) -> None:
    messages = [[{"role": "user", "content": text}] for text in QUESTIONS]
    params = [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=1, seed=5, max_tokens=30, repetition_penalty=1.2, logprobs=1),
        SamplingParams(temperature=0.7, seed=6, max_tokens=30, top_p=0.9, min_tokens=20),
    ]
    with LLM("tiny-qwen3", dtype="float32") as llm:
        expected = [o.outputs[0] for o in llm.chat(messages, params, use_tqdm=False)]
    with engine(head, max_num_seqs=2) as llm:
        found = [o.outputs[0] for o in llm.chat(messages, params, use_tqdm=False)]
        assert llm.stats.num_draft_tokens > 60
    for a, b in zip(found, expected, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)


class Sequence(NamedTuple):
    slot: int
    token_ids: tuple[int, ...]


def test_a_gpu_finds_slots_and_positions_of_drafts_where_it_finds_a_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each draft token has the noise of its own position, and its own request's settings."""
    pytest.importorskip("triton")
    from nanoserve.sampling.fused_sampler import FusedSampler

    sample, found = FusedSampler.sample, []

    def compared(self: FusedSampler, logits: Any, slots: Any, positions: Any, rows: Any) -> Any:
        ours = sample(self, logits, slots, positions, rows)
        if isinstance(rows, DraftRows):
            theirs = sample(self, logits, slots, positions)
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            found.append(len(slots))
        return ours

    state, slots, lengths = torch.randn(3, HIDDEN_SIZE), [2, 0, 3], [7, 4, 11]
    sequences = [
        Sequence(slot, tuple([1] * length)) for slot, length in zip(slots, lengths, strict=True)
    ]
    monkeypatch.setattr(FusedSampler, "sample", compared)
    with engine("tiny-qwen3", max_num_seqs=4, num_kv_blocks=8) as llm:
        runner = llm.engine.executor
        sampler = FusedSampler(4, llm.engine.model_config.vocab_size, torch.device("cpu"))
        for slot in range(4):
            params = SamplingParams(temperature=0.5 * slot, top_p=1 - 0.1 * (slot == 2))
            sampler.set_slot(SlotUpdate(slot, params, seed=slot))
        monkeypatch.setattr(runner, "sampler", sampler)
        (speculation,) = (e for e in llm.engine.extensions if isinstance(e, Speculation))
        for row, seq in enumerate(sequences):
            speculation.proposer._known[seq] = (state, row, len(seq.token_ids))
        drafts = speculation.proposer.propose([(seq, 3) for seq in sequences])
    assert found == [3] * 3 and [len(own) for own in drafts] == [3] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2, .* needs the whole embedding"),
        ({"capture_sampling": True}, "capture_sampling=True: .* graphs with sampling do not keep"),
    ],
)
def test_what_it_cannot_go_with_is_refused(
    options: dict[str, Any], message: str, head: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        engine(head, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_tells_what_it_will_take(head: Path, dtype: str) -> None:
    """In the model's dtype; it has no KV cache."""
    drafts = {"method": "hidden_head", "model": str(head)}
    config = EngineConfig("tiny-qwen3", speculative_config=drafts).for_device("cpu")
    model_config = replace(
        Checkpoint.open("tiny-qwen3", config).model_config(config, ["Qwen3ForCausalLM"]),
        dtype=dtype,
    )
    numbers = sum(weight.numel() for weight in load_file(head).values())
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    memory = prepare_hidden_head(config, model_config).second_model_memory
    assert memory is not None and memory() == SecondModelMemory(itemsize * numbers)


def test_a_head_of_another_model_or_none_is_refused(tmp_path: Path) -> None:
    HiddenHead.untrained(64, 8).save(tmp_path / "head.safetensors")
    message = f"hidden_size=64, but the model has hidden_size={HIDDEN_SIZE}"
    with pytest.raises(ValueError, match=message):
        engine(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="is neither a file nor one of"):
        engine(tmp_path / "no.safetensors")
