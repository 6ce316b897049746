"""Templates that users give: a file or a text, for a conversation, an engine or a server."""

import json
from pathlib import Path
from typing import Any

import pytest

import nanoserve
from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.text.chat import prompts_of
from nanoserve.text.chat_template import load_chat_template

QUESTION = [{"role": "user", "content": "Hi"}]
OURS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ note }}"
TINY = Path(nanoserve.__file__).parent / "checkpoint" / "tiny_qwen3" / "model"
ONE = SamplingParams(max_tokens=1, temperature=0)
# Like Qwen2.5's and Llama 3.1's: calls are written as JSON, and the arguments with them.
CALLING = """{% for m in messages %}{{ m.content or "" }}{% for call in m.tool_calls or [] %}
{{ call.function | tojson }}{% for key, value in call.function.arguments | items %} {{ key }}
{% endfor %}{% endfor %}{% endfor %}"""


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def untemplated(tmp_path_factory) -> Path:
    """The tokenizer of the bundled model, without its template."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("untemplated")
    with LLM("tiny-qwen3", num_kv_blocks=64) as llm:
        tokenizer = llm.get_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    return folder


def prompt(llm: LLM, messages: Any = QUESTION, **options: Any) -> str:
    (one,) = prompts_of(llm.engine, messages, **options)
    return one["prompt"]


def test_a_template_is_a_file_or_a_text(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OURS)
    stored = tmp_path / "chat_template.json"
    stored.write_text(json.dumps({"chat_template": OURS}))
    for given in (OURS, file, str(file), stored):
        assert load_chat_template(given) == OURS
        assert prompt(llm, chat_template=given) == "<user>Hi"
    assert load_chat_template(load_chat_template(file)) == OURS  # what an engine is given again


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("no-such-file.jinja", "neither a file nor a template"),
        ("", "neither a file nor a template"),
        (5, "must be a file or a template string"),
        ("{% for m in messages %}", r"chat_template is not valid Jinja: .*\(line 1\)"),
        ("{{ messages", "chat_template is not valid Jinja"),
        ("{{ 1 }}", "does not use the variable `messages`"),
        ("x" * 5000, "does not use the variable `messages`"),
        ("\0", "neither a file nor a template"),
    ],
)
def test_what_is_no_template_is_refused_before_a_model_is_loaded(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LLM("no-such-model", chat_template=given)


def test_files_that_hold_none_are_refused(tmp_path: Path) -> None:
    binary, empty, other = (tmp_path / name for name in ("a.jinja", "b.json", "c.json"))
    binary.write_bytes(b"\xff\xfe{{ messages }}")
    empty.write_text("{}")
    other.write_text('{"chat_template": [1]}')
    for file in (binary, empty, other, tmp_path):
        with pytest.raises(ValueError, match="chat_template"):
            EngineConfig("m", chat_template=str(file))
    with pytest.raises(ValueError, match="needs a tokenizer"):
        EngineConfig("m", chat_template=OURS, skip_tokenizer_init=True)


def test_an_engine_may_have_a_template_of_its_own(untemplated: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OURS)
    options = {"tokenizer": str(untemplated), "num_kv_blocks": 64}
    with LLM("tiny-qwen3", chat_template=file, **options) as llm:
        assert llm.chat(QUESTION, ONE, use_tqdm=False)[0].prompt == "<user>Hi"
        assert prompt(llm, chat_template="{{ messages[0].role }}") == "user"
        asked = llm.get_tokenizer().apply_chat_template(QUESTION, tokenize=False)
        assert asked == "<user>Hi" and llm.engine.config.chat_template == OURS
    with LLM("tiny-qwen3", **options) as llm:
        with pytest.raises(ValueError, match=r"--chat-template FILE.*/v1/completions"):
            llm.chat(QUESTION, ONE, use_tqdm=False)
        assert prompt(llm, chat_template=file) == "<user>Hi"


def test_a_checkpoints_several_templates_have_names(llm: LLM, monkeypatch) -> None:
    several = {"default": OURS, "rag": "{{ messages[0].content }} found"}
    monkeypatch.setattr(llm.engine.tokenizer._hf, "chat_template", several)
    vars(llm.engine.tokenizer).pop("hugging_face", None)
    try:
        assert prompt(llm, chat_template="rag") == "Hi found"
        with pytest.raises(ValueError, match="neither a file nor a template"):
            prompt(llm, chat_template="rags")
    finally:
        vars(llm.engine.tokenizer).pop("hugging_face", None)


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*QUESTION, called, {"role": "tool", "tool_call_id": "1", "content": "18"}]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        (' {"n": [1, {"a": null}]}\n', {"n": [1, {"a": None}]}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        (None, {}),
    ],
)
def test_arguments_that_are_a_text_are_shown_as_an_object(
    llm: LLM, arguments: Any, found: dict[str, Any]
) -> None:
    messages = calling(arguments)
    before = json.dumps(messages)
    text = prompt(llm, messages, chat_template=CALLING)
    assert text == prompt(llm, calling(found), chat_template=CALLING)
    assert json.dumps({"name": "f", "arguments": found}).encode().decode() in text
    assert json.dumps(messages) == before  # which is the caller's
    outputs = llm.chat([messages, messages], ONE, use_tqdm=False, chat_template=CALLING)
    assert {output.prompt for output in outputs} == {text}


@pytest.mark.parametrize("arguments", ["Paris", "[1]", '{"a": 1', "5", [1]])
def test_arguments_that_are_no_object_are_refused(llm: LLM, arguments: Any) -> None:
    if isinstance(arguments, str):
        with pytest.raises(ValueError, match="arguments of 'f' must be a JSON object"):
            prompt(llm, calling(arguments))
    pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
    from nanoserve.serve.http.errors import ApiError
    from nanoserve.serve.http.tools.tool_choice import with_parsed_arguments

    with pytest.raises(ApiError, match="arguments of 'f' must be a JSON object"):
        with_parsed_arguments(calling(arguments)[1])


def test_calls_in_a_templates_own_form_are_left_to_it(llm: LLM) -> None:
    template = "{{ messages[1].tool_calls }}"
    for calls in ([{"name": "f", "arguments": "{}"}], ["f()"], {"f": 1}, "f()"):
        messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        assert prompt(llm, messages, chat_template=template) == str(calls)
