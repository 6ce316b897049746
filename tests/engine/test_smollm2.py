"""The engine on a real model: each way to serve it gives what the plain engine gives.

With floats throughout. That what it says is right is for tests/models/test_smollm2.py.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from smollm2 import IN_FLOATS, LENGTH, QUESTIONS, greedy, message, require_smollm2

require_smollm2()

from nanoserve import LLM, RequestOutput, StructuredOutputsParams  # noqa: E402

pytestmark = pytest.mark.size("full")

STORY = (
    "Long ago, a fox and an old crow lived beside a river. Each morning the crow flew over the "
    "fields and told the fox what she had seen, and each evening the fox told her what he had "
    "heard. "
)
COPIED = STORY * 3 + "Long ago, a fox and"
QUESTION = "Describe a garden in spring."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", **IN_FLOATS, **LENGTH) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_cached(llm: LLM) -> None:
    llm.reset_prefix_cache()


def answer(llm: LLM, max_tokens: int = 48, **params: Any) -> list[RequestOutput]:
    conversations = [message(question) for question in (*QUESTIONS, QUESTION)]
    return llm.chat(conversations, greedy(max_tokens, **params), use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_stream_is_the_whole_answer(llm: LLM) -> None:
    questions = [QUESTION, "Répète : « Ça va, Zoë ? » 😀", "Count from 1 to 5."]
    whole = llm.chat([message(question) for question in questions], greedy(48), use_tqdm=False)
    for question, output in zip(questions, whole, strict=True):
        deltas = list(llm.stream(message(question), greedy(48)))
        assert "".join(delta.outputs[0].text for delta in deltas) == output.outputs[0].text
        assert [i for ids in tokens(deltas) for i in ids] == tokens([output])[0]
        assert deltas[-1].outputs[0].finish_reason == output.outputs[0].finish_reason
        assert len(deltas) > 2


def test_json_by_a_schema(llm: LLM) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "languages": {
                "type": "array",
                "items": {"enum": ["English", "French", "Chinese"]},
                "maxItems": 2,
            },
        },
        "required": ["name", "age", "languages"],
        "additionalProperties": False,
    }
    params = greedy(150, structured_outputs=StructuredOutputsParams(json=person))
    asked = [f"Describe {who} as JSON." for who in ("Albert Einstein", "a child", "your friend")]
    for output in llm.chat([message(text) for text in asked], params, use_tqdm=False):
        assert output.outputs[0].finish_reason == "stop"
        told = json.loads(output.outputs[0].text)
        assert [*told] == ["name", "age", "languages"]
        assert isinstance(told["name"], str) and 0 < len(told["name"]) <= 30
        assert isinstance(told["age"], int) and 0 <= told["age"] <= 120
        assert len(told["languages"]) <= 2
        assert {*told["languages"]} <= {"English", "French", "Chinese"}
    choice = greedy(8, structured_outputs=StructuredOutputsParams(choice=["London", "Paris"]))
    (output,) = llm.chat(message("What is the capital of France?"), choice, use_tqdm=False)
    assert output.outputs[0].text in ("London", "Paris")


def test_ngram_guesses_change_nothing_and_some_are_right(llm: LLM) -> None:
    plain = tokens(llm.generate(COPIED, greedy(40), use_tqdm=False)), tokens(answer(llm))
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    options = {"speculative_config": config, **IN_FLOATS, **LENGTH}
    with LLM("smollm2", **options) as guessing:
        copied = tokens(guessing.generate(COPIED, greedy(40), use_tqdm=False))
        stats = guessing.stats
        assert stats.num_accepted_tokens >= stats.num_draft_tokens // 2 > 0
        assert stats.num_steps < 30
        assert (copied, tokens(answer(guessing))) == plain


def test_a_shared_beginning_is_found_in_the_cache(llm: LLM) -> None:
    told = [[*message(STORY), {"role": "assistant", "content": "A nice story!"}, *message(text)]
            for text in ("Who flew?", "Who lived beside a river?")]  # fmt: skip
    apart = []
    for conversation in told:
        llm.reset_prefix_cache()
        (output,) = llm.chat(conversation, greedy(), use_tqdm=False)
        assert output.metrics.num_cached_prompt_tokens == 0
        apart.append(output)
    llm.reset_prefix_cache()
    before = llm.stats.prefix_cache_hits
    together = [llm.chat(conversation, greedy(), use_tqdm=False)[0] for conversation in told]
    assert llm.stats.prefix_cache_hits - before >= 48
    assert [output.metrics.num_cached_prompt_tokens >= 48 for output in together] == [False, True]
    assert tokens(together) == tokens(apart)


def test_preempted_requests_answer_the_same(llm: LLM) -> None:
    plain = tokens(answer(llm, ignore_eos=True))
    tight = LENGTH | {"max_model_len": 160, "num_kv_blocks": 24}
    with LLM("smollm2", **IN_FLOATS, **tight) as small:
        assert tokens(answer(small, ignore_eos=True)) == plain
        assert small.stats.num_preemptions > 0
        small.engine.scheduler.check()


def test_an_aborted_request_gives_back_its_blocks_and_disturbs_nobody(llm: LLM) -> None:
    (plain,) = tokens(llm.chat(message(QUESTION), greedy(20), use_tqdm=False))
    engine = llm.engine
    prompt = llm.chat(message(QUESTION), greedy(1), use_tqdm=False)[0].prompt_token_ids
    for name, length in (("aborted", 400), ("kept", 20)):
        engine.add_request(name, prompt, greedy(length))
    for _ in range(6):
        engine.step()
    ended = engine.abort_request("aborted")
    assert ended is not None and ended.outputs[0].finish_reason == "abort"
    assert tokens([ended])[0] == plain[: len(tokens([ended])[0])] and len(tokens([ended])[0]) >= 5
    kept: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        kept += engine.step()
    assert {output.request_id for output in kept} == {"kept"} and tokens(kept[-1:]) == [plain]
    pool = engine.scheduler.block_manager
    assert pool.num_free_blocks == pool.num_blocks
    engine.scheduler.check()
