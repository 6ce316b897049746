"""`nanoserve chat`: the answers of the model, line by line."""

import io

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.cli.main import main


def say(monkeypatch, capsys, lines: str, *arguments: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Answers to two questions in one conversation, and to the second one alone."""
    params = SamplingParams(temperature=0, max_tokens=30)
    first = [{"role": "user", "content": "What is a KV cache?"}]
    second = {"role": "user", "content": "2 + 3?"}
    with LLM("tiny-qwen3") as llm:

        def answer(messages) -> str:
            return llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text

        one = answer(first)
        two = answer([*first, {"role": "assistant", "content": one}, second])
        return [one, two, answer([second])]


def test_a_conversation_has_a_memory_until_a_new_one_begins(monkeypatch, capsys, expected) -> None:
    lines = "What is a KV cache?\n\n2 + 3?\n/new\n2 + 3?\n/exit\nnot asked any more\n"
    out = say(monkeypatch, capsys, lines, "--temperature", "0", "--max-tokens", "30")
    assert out == "".join(f"{text}\n" for text in expected)


def test_a_server_answers_the_same(monkeypatch, capsys, expected) -> None:
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    from serving import served

    from nanoserve import AsyncLLM

    llm = AsyncLLM("tiny-qwen3")
    try:
        with served(llm, api_key=["key"]) as server:
            asked = ["--url", server.url, "--temperature", "0", "--max-tokens", "30"]
            lines = "What is a KV cache?\n2 + 3?\n/new\n2 + 3?\n"
            out = say(monkeypatch, capsys, lines, *asked, "--api-key", "key")
            assert out == "".join(f"{text}\n" for text in expected)
            assert main(["chat", *asked]) == 1
            assert "answers 401" in capsys.readouterr().err
            assert main(["chat", *asked, "--block-size", "8"]) == 1
            assert "block_size" in capsys.readouterr().err
    finally:
        llm.shutdown()


def test_a_ctrl_c_stops_the_answer_and_not_the_conversation(monkeypatch, capsys) -> None:
    from nanoserve.cli import chat

    asked = []

    def answer(messages):
        asked.append(list(messages))
        yield "half an"
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    chat.converse(answer, "Be short.")
    assert capsys.readouterr().out == "half an ...\n" * 2
    assert [message["content"] for message in asked[1]] == ["Be short.", "a", "half an", "b"]
