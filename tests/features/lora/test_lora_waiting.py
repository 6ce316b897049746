"""Requests that wait for an adapter, for room for it or for a place: all of them end, and right."""

import time
from pathlib import Path
from typing import Any

import pytest
from lora_models import greedy, request_for, write_adapter
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.features.lora import extension, store
from nanoserve.features.lora.extension import LoRAAdapters

PROMPT = [7, 8, 9, 7, 250, 3, 17, 5, 6]
NUM_TOKENS = 6
OPTIONS: dict[str, Any] = {
    **{"dtype": "float32", "skip_tokenizer_init": True, "enable_lora": True, "max_lora_rank": 8},
    **{"block_size": 4, "num_kv_blocks": 100, "max_model_len": 80, "attention_backend": "torch"},
}
NUM_ADAPTERS = 12
Served = tuple[Path, list[LoRARequest], list[list[int]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A base, adapters, and what each adapter answers."""
    base = tmp_path_factory.mktemp("base")
    model, adapters, answers = make_qwen3(base, num_hidden_layers=1).eval(), [], []
    for seed in range(NUM_ADAPTERS):
        merged = write_adapter(model, base / str(seed), seed, ("q_proj", "up_proj"), 4, size=0.4)
        adapters.append(request_for(base / str(seed), str(seed), seed + 1))
        answers.append(greedy(merged, PROMPT, NUM_TOKENS) if seed < 2 else [])
    return base, adapters, answers


def params(max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def adapters_of(llm: LLM) -> LoRAAdapters:
    (own,) = [each for each in llm.engine.extensions if isinstance(each, LoRAAdapters)]
    return own


def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read = store.read_adapter

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return read(*args)

    monkeypatch.setattr(store, "read_adapter", slowly)


def finish(llm: LLM, most_steps: int = 500) -> dict[str, list[int]]:
    """Return the tokens of all requests, by name. Nothing may be left of them."""
    found = {}
    for _ in range(most_steps):
        for output in llm.engine.step():
            assert output.error is None, output.error
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    assert not llm.engine.has_unfinished_requests()
    llm.engine.scheduler.check()
    adapters_of(llm).on_step_start()
    assert adapters_of(llm).num_unfinished == 0
    return found


def test_an_adapter_that_is_not_in_memory_is_not_starved(served: Served) -> None:
    """Requests for the one in memory come one after the other, so it is never without."""
    base, adapters, answers = served
    rare, popular, *_ = adapters
    with LLM(str(base), **OPTIONS) as llm:
        engine, num_added, ended = llm.engine, 0, []
        engine.add_request("popular", PROMPT, params(), lora_request=popular)
        engine.step()
        engine.add_request("rare", PROMPT, params(), lora_request=rare)
        for _ in range(400):
            while len(engine.output_processor.requests) < 5:
                engine.add_request(str(num_added), PROMPT, params(), lora_request=popular)
                num_added += 1
            ended += [output for output in engine.step() if output.finished]
            if any(output.request_id == "rare" for output in ended):
                break
        else:
            pytest.fail(f"it waits, while {num_added} others came")
        found = {one.request_id: list(one.outputs[0].token_ids) for one in ended} | finish(llm)
        assert found["rare"] == answers[0] and found["popular"] == answers[1]
        assert num_added > 5 and adapters_of(llm).num_adapters == 1


def test_adapters_that_wait_for_a_thread_are_not_late(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them take longer than the limit, which is one for each."""
    slow_reads(monkeypatch)
    monkeypatch.setattr(extension, "_TIME_LIMIT", 0.7)
    base, adapters, answers = served
    with LLM(str(base), **OPTIONS, max_cpu_loras=NUM_ADAPTERS) as llm:
        outputs = llm.generate(
            [PROMPT] * NUM_ADAPTERS, params(), use_tqdm=False, lora_request=adapters
        )
        assert [output.error for output in outputs] == [None] * NUM_ADAPTERS
        assert outputs[0].outputs[0].token_ids == answers[0]


def test_running_requests_that_are_reset_give_their_place_to_who_claims_it(served: Served) -> None:
    base, adapters, answers = served
    with LLM(str(base), **OPTIONS, max_cpu_loras=2) as llm:
        engine = llm.engine
        llm.generate([PROMPT] * 2, params(1), use_tqdm=False, lora_request=adapters[:2])
        engine.add_request("first", PROMPT, params(60), lora_request=adapters[0])
        engine.add_request("claimant", PROMPT, params(), lora_request=adapters[1])
        engine.add_request("second", PROMPT, params(60), lora_request=adapters[0])
        for _ in range(extension.PATIENCE + 4):
            engine.step()
        assert len(engine.scheduler.running) == 2
        llm.reset_prefix_cache(reset_running_requests=True)
        found = finish(llm)
    assert found["claimant"] == answers[1]
    assert found["first"] == found["second"] and found["first"][:NUM_TOKENS] == answers[0]


def test_models_that_read_their_weights_themselves_have_adapters(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanoserve.checkpoint.loader import load_weights
    from nanoserve.models.qwen3 import Qwen3ForCausalLM

    class OwnLoader(Qwen3ForCausalLM):
        def load_weights(self, source: Any, load_format: str) -> None:
            load_weights(self, source, load_format)

    monkeypatch.setattr("nanoserve.worker.load_model.model_class", lambda name: OwnLoader)
    base, adapters, answers = served
    with LLM(str(base), **OPTIONS) as llm:
        assert isinstance(llm.engine.executor.model, OwnLoader)  # type: ignore[attr-defined]
        outputs = llm.generate([PROMPT] * 2, params(), use_tqdm=False, lora_request=adapters[:2])
    assert [list(output.outputs[0].token_ids) for output in outputs] == answers[:2]
    assert answers[0] != answers[1]
