"""A budget for the reasoning of a request."""

from typing import Any

import pytest
from serving import ask, served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve import SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.sampling.thinking_budget import ThinkingBudget
from nanoserve.serve.http.tools.reasoning import REASONING, Thought
from nanoserve.serve.http.tools.thought_budget import budget_of
from nanoserve.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
ASKED = CHAT | {"max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
FORCED = [50, 51, 52]
PIECES = {1: b"<think>", 2: b"<", 3: b"think>", 4: b"\n", 5: b"</think", 6: b">", 7: b".</"}
PIECES |= {50: b"</", 51: b"think", 52: b">"}


def processor(num_tokens: int, is_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(num_tokens, [b"<think>"], [b"</think>"], PIECES, FORCED, is_open)


def continued(budget: ThinkingBudget, written: list[int]) -> list[int]:
    """The output of a model that would write `written`, and then 9 without end."""
    token_ids: list[int] = []
    while len(token_ids) < 12:
        at = len(token_ids)
        forced = budget.forced_token(token_ids)
        own = written[at] if at < len(written) else 9
        token_ids.append(own if forced is None else forced)
    return token_ids


@pytest.mark.parametrize(
    ("num_tokens", "is_open", "written", "expected"),
    [
        (0, True, [], FORCED),
        (3, True, [], [9, 9, 9, *FORCED, 9]),
        (3, True, [5, 6, 9], [5, 6, 9, 9]),  # it has ended by itself
        (3, True, [9, 7, 51, 6], [9, 7, 51, *FORCED]),  # a tag that was cut off is written again
        (3, True, [9, 9, 50, 9], [9, 9, 50, 51, 52, 9]),  # ... unless its tokens are the same
        (3, True, [9, 50, 51, 9], [9, 50, 51, 52, 9]),
        (2, False, [1], [1, 9, 9, *FORCED, 9]),
        (2, False, [4, 2, 3], [4, 2, 3, 9, 9, *FORCED, 9]),
        (0, False, [1], [1, *FORCED]),
        (2, False, [9, 1], [9, 1, 9, 9, 9, 9, 9]),  # no reasoning
        (2, False, [], [9] * 12),
        (2, False, [1, 5, 6], [1, 5, 6, 9, 9]),
        (100, True, [], [9] * 12),
    ],
)
def test_a_thought_ends_after_its_budget(
    num_tokens: int, is_open: bool, written: list[int], expected: list[int]
) -> None:
    found = continued(processor(num_tokens, is_open), written)
    assert found[: len(expected)] == expected
    assert found.count(52) <= 1 and found[len(expected) :].count(50) == 0


def test_the_only_token_left_is_the_forced_one() -> None:
    import torch

    logits = torch.randn(64)
    assert processor(1)([], logits) is logits
    forced = processor(0)([], logits)
    assert forced.argmax() == 50 and forced.isfinite().sum() == 1 and forced.dtype == logits.dtype
    params = SamplingParams(logits_processors=[processor(0)])
    assert params.logits_processors


@pytest.mark.parametrize("name", list(REASONING))
def test_every_tag_is_found_in_any_split(name: str) -> None:
    tokenizer, form = Tokenizer(bundled_checkpoint("tiny-qwen3")), REASONING[name]
    for close in form.closes:
        for before in ("", "a", ".", ">", "<", "\n"):
            for behind in ("", "a", ">", "\n\n"):
                thought = tokenizer.encode(f"{before}{close}{behind}", False)
                budget = budget_of(len(thought), name, Thought.OPEN, tokenizer)
                assert budget is not None and budget.forced_token(thought) is None
    for opening in form.opens:
        begun = tokenizer.encode(f"\n{opening}", False)
        budget = budget_of(0, name, Thought.NONE, tokenizer)
        assert budget is not None and budget.forced_token(begun) is not None
        assert budget.forced_token(tokenizer.encode("Just text", False)) is None
    assert budget_of(5, name, Thought.CLOSED, tokenizer) is None
    assert budget_of(-1, name, Thought.OPEN, tokenizer) is None


@pytest.fixture(scope="module")
def thinking(server_llm):
    with served(server_llm, reasoning_parser="deepseek_r1") as one:
        yield one


def answer_of(server: Any, **more: Any) -> tuple[list[int], dict[str, Any]]:
    status, _, answer = ask(server, "/v1/chat/completions", ASKED | more)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["message"]


def test_an_answer_begins_after_the_budget(thinking, server_llm) -> None:
    free, message = answer_of(thinking)
    assert message["reasoning"] and not message["content"]
    tag = server_llm.engine.tokenizer.encode("</think>", False)
    for num_tokens in (0, 5):
        token_ids, message = answer_of(thinking, thinking_token_budget=num_tokens)
        assert token_ids[:num_tokens] == free[:num_tokens]
        assert token_ids[num_tokens : num_tokens + len(tag)] == tag
        assert message["content"] and bool(message["reasoning"]) == bool(num_tokens)
    assert answer_of(thinking, thinking_token_budget=-1)[0] == free
    assert answer_of(thinking, thinking_token_budget=1000)[0] == free
    sampled = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
    token_ids, _ = answer_of(thinking, **sampled)
    assert answer_of(thinking, **sampled, thinking_token_budget=1000)[0] == token_ids
    cut, _ = answer_of(thinking, **sampled, thinking_token_budget=3)
    assert cut[: 3 + len(tag)] == [*token_ids[:3], *tag]


def test_a_grammar_applies_after_the_budget(thinking) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    asked = {"guided_choice": ["yes", "no"], "thinking_token_budget": 4, "ignore_eos": False}
    _, message = answer_of(thinking, **asked)
    assert message["content"] in ("yes", "no") and message["reasoning"]


def test_a_budget_that_cannot_be_kept_is_refused(thinking, server_llm) -> None:
    path, field = "/v1/chat/completions", "thinking_token_budget"
    for wrong in (-2, "5", 1.5):
        status, _, answer = ask(thinking, path, CHAT | {field: wrong})
        assert status == 400 and answer["error"]["param"] == field
    with served(server_llm) as plain, served(server_llm, tool_call_parser="openai") as harmony:
        for server, what in ((plain, "--reasoning-parser"), (harmony, "reasoning_effort")):
            status, _, answer = ask(server, path, CHAT | {field: 5})
            assert status == 400 and what in answer["error"]["message"]
        assert ask(plain, path, CHAT | {field: -1, "max_tokens": 1})[0] == 200
    status, _, answer = ask(thinking, "/v1/completions", {"prompt": "a", field: 5})
    assert status == 400 and answer["error"]["param"] == field
    with pytest.raises(ValueError, match="ThinkingBudget"):
        SamplingParams(thinking_token_budget=5)
