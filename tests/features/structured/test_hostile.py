"""Whatever is asked for, it is refused or answered, and the engine and its neighbours live on."""

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
from hostile_grammars import hostile_grammars

_LONGEST = 20  # seconds for one of them: none takes a tenth of that on an idle machine


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("hostile")
    make_qwen3(path, vocab_size=2048)
    with LLM(path, tokenizer="tiny-qwen3", max_model_len=128, num_kv_blocks=64) as llm:
        yield llm


def test_hostile_grammars_are_refused_or_answered(
    llm: LLM, by_size: Callable[..., set[str]]
) -> None:
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (alone,) = llm.generate([[3, 4]], plain, use_tqdm=False)
    outcomes: Counter[str] = Counter()
    slowest = by_size({"3,000 optional properties"}, set())
    for name, guide in hostile_grammars().items():
        if name in slowest:
            continue
        began = time.monotonic()
        try:
            params = SamplingParams(
                temperature=1.0,
                seed=1,
                max_tokens=20,
                structured_outputs=StructuredOutputsParams(**guide),
            )
            hostile, beside = llm.generate([[5], [3, 4]], [params, plain], use_tqdm=False)
        except ValueError as error:
            assert str(error), name
            outcomes["refused"] += 1
        else:
            assert beside.outputs[0].token_ids == alone.outputs[0].token_ids, name
            is_error = hostile.error is not None
            assert not is_error or "structured_outputs" in str(hostile.error), name
            outcomes["failed" if is_error else "answered"] += 1
        assert time.monotonic() - began < _LONGEST, name
        assert not llm.engine.has_unfinished_requests()
    print(outcomes)
    assert outcomes["refused"] >= 8 and outcomes["answered"] >= 5, outcomes
