"""The page's conversations in a real browser: branches, files, export and import, parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
from browser_tab import Tab, error, stream_of

from nanoserve.cli.chat.saved import save

pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

QUESTION = "What is a KV cache?"
FULL = pytest.mark.size("full")


def said(asked: list[dict[str, Any]]) -> list[list[str]]:
    return [[message["content"] for message in request["messages"]] for request in asked]


def step(tab: Tab, label: str) -> None:
    tab.page.click(f"button[aria-label='{label}']:visible")


def shown(tab: Tab) -> list[str]:
    return tab.page.locator("#log :is(.bubble .text, .markdown)").all_inner_texts()


def ended(text: str, reason: str = "stop", **usage: int) -> dict[str, Any]:
    """A response with a finish reason and the server's count of tokens."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": text}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
    ]
    if usage:
        chunks.append({"choices": [], "usage": usage})
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return {"body": f"{events}data: [DONE]\n\n", "content_type": "text/event-stream"}


# ---------------------------------------------------------------- branches


def test_versions_of_a_question_are_kept_with_their_answers(tab: Tab) -> None:
    asked = tab.answer_with(*map(stream_of, ("one", "two", "three", "four")))
    page = tab.page
    tab.ask("first")
    tab.answer()
    tab.ask("and then")
    page.wait_for_selector("text=two")
    page.hover(".user >> nth=0")
    page.click("button[aria-label='Edit and ask again'] >> nth=0")
    assert page.input_value("[name=question]") == "first"
    tab.ask("second")
    page.wait_for_selector("text=three")
    assert shown(tab) == ["second", "three"]
    assert page.inner_text(".user .number") == "2 of 2"
    step(tab, "Earlier version of the question")
    assert shown(tab) == ["first", "one", "and then", "two"]
    focused = "document.activeElement.getAttribute('aria-label')"  # the other arrow is at its end
    assert page.evaluate(focused) == "Later version of the question"
    page.keyboard.press("Enter")
    assert shown(tab) == ["second", "three"]
    tab.ask("and so on")
    page.wait_for_selector("text=four")
    assert said(asked) == [
        ["first"],
        ["first", "one", "and then"],
        ["second"],
        ["second", "three", "and so on"],
    ]
    page.reload()
    page.click("#conversations .choose")
    assert shown(tab) == ["second", "three", "and so on", "four"]
    step(tab, "Earlier version of the question")
    assert shown(tab) == ["first", "one", "and then", "two"]


@FULL
def test_answers_are_kept_unless_they_are_empty(tab: Tab) -> None:
    tab.answer_with("abort", *map(stream_of, ("one", "two")))
    page = tab.page
    tab.ask("first")
    tab.answer()
    for text in ("one", "two"):
        page.click("button[aria-label='Answer again']")
        page.wait_for_selector(f"text={text}")
    assert page.inner_text(".assistant .number") == "2 of 2"
    assert page.is_disabled("button[aria-label='Later answer']")
    step(tab, "Earlier answer")
    assert shown(tab) == ["first", "one"]


def test_a_cut_answer_is_continued(tab: Tab) -> None:
    cut = {"post": {"max_tokens": 9, "temperature": 0}}
    asked = tab.answer_with({"post": {"temperature": 0}}, cut, {"post": {"temperature": 0}})
    page = tab.page
    tab.ask(QUESTION)
    whole = tab.answer()
    assert not page.is_visible("button[aria-label='Continue this answer']")
    page.click("button[aria-label='Answer again']")
    page.wait_for_selector("text=Cut off at the limit, after 9 tokens.")
    part = tab.answer()
    page.click("button[aria-label='Continue this answer']")
    page.wait_for_selector(".assistant:not(.coming) .note:empty", state="attached")
    assert len(part) < len(whole) and tab.answer() == whole
    assert asked[2]["messages"][-1]["role"] == "assistant"
    assert asked[2]["continue_final_message"] is True and not asked[2]["add_generation_prompt"]
    assert page.inner_text(".assistant .timing").startswith("4")  # both parts: 48 or 49 tokens


def test_what_is_not_a_plain_text_is_not_continued(tab_of_module: Tab) -> None:
    found = tab_of_module.page.evaluate(
        """async () => {
          const { canContinue } = await import("/page/chat.js");
          const cut = { state: "done", reason: "length", content: "half", thinking: "" };
          const others = [{ thinking: "hm" }, { format: "json" }, { content: "<think>x" },
            { content: " " }, { reason: "stop" }, { state: "streaming" }];
          return [cut, { ...cut, state: "stopped" }, ...others.map((one) => ({ ...cut, ...one }))]
            .map(canContinue);
        }"""
    )
    assert found == [True, True] + [False] * 6


OLD = {
    "id": "old",
    "title": "An old one",
    "isNamed": False,
    "changed": 5,
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi", "thinking": "", "state": "streaming"},
    ],
}


def test_conversations_of_older_versions_of_the_page_go_on(tab: Tab) -> None:
    asked = tab.answer_with(stream_of("fine"))
    stored = {"old": OLD, "bad": {**OLD, "id": "bad", "messages": [{"role": "robot"}]}}
    for name, conversation in stored.items():
        store = "([name, text]) => localStorage.setItem(`nanoserve.conversation.${name}`, text)"
        tab.page.evaluate(store, [name, json.dumps(conversation)])
    tab.page.reload()
    assert tab.titles() == ["An old one"]
    tab.page.click("#conversations .choose")
    assert shown(tab) == ["hello", "hi"] and tab.note() == "Stopped."
    tab.ask("how are you?")
    tab.page.wait_for_selector("text=fine")
    assert said(asked) == [["hello", "hi", "how are you?"]]


# ---------------------------------------------------------------- files


def files(**content: bytes) -> list[dict[str, Any]]:
    named = {name.replace("_", "."): text for name, text in content.items()}
    return [{"name": name, "mimeType": "", "buffer": text} for name, text in named.items()]


def test_text_files_are_attached_and_sent_as_text(tab: Tab) -> None:
    asked = tab.answer_with(stream_of("yes"), stream_of("no"))
    page = tab.page
    page.set_input_files(
        "#attach-file",
        files(a_py=b"x = '```'\r\n", b_txt="größer".encode("utf-16"), c_md=b"# C"),
    )
    page.wait_for_selector("#attachments li >> nth=2")
    assert page.is_enabled("#send")  # files alone can be sent
    page.click("button[aria-label='Remove c.md']")
    assert page.locator("#attachments .name").all_inner_texts() == ["a.py", "b.txt"]
    tab.ask("What are these?")
    assert tab.answer() == "yes" and page.is_hidden("#attachments")
    sent = "File “a.py”:\n\n````\nx = '```'\n\n````\n\nFile “b.txt”:\n\n```\ngrößer\n```"
    assert said(asked) == [[f"{sent}\n\nWhat are these?"]]
    page.reload()
    page.click("#conversations .choose")
    assert page.locator("#log .file .name").all_inner_texts() == ["a.py", "b.txt"]
    page.click("#log .file summary >> nth=1")
    assert page.inner_text("#log .file pre >> nth=1") == "größer"
    page.hover(".user")
    page.click("button[aria-label='Edit and ask again']")
    assert page.locator("#attachments .name").all_inner_texts() == ["a.py", "b.txt"]
    page.keyboard.press("Escape")
    assert page.is_hidden("#attachments")


@pytest.mark.parametrize(
    ("content", "notice"),
    [
        (b"\x89PNG\r\n\x1a\n\x00", "not a text file"),
        pytest.param(b"x" * 300_000, "at most 256 KB", marks=FULL),
        pytest.param(b"\xff\xff", "not a text file", marks=FULL),
        pytest.param(b" \n", "is empty", marks=FULL),
    ],
)
def test_other_files_are_refused_by_name(tab: Tab, content: bytes, notice: str) -> None:
    tab.page.set_input_files("#attach-file", files(x_dat=content))
    tab.page.wait_for_selector("#toast:visible")
    text = tab.page.inner_text("#toast")
    assert "“x.dat”" in text and notice in text and tab.page.is_hidden("#attachments")


def test_a_dropped_file_is_attached(tab: Tab) -> None:
    tab.page.evaluate(
        """() => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File(["dropped"], "<b>.txt"));
          document.getElementById("log").dispatchEvent(
            new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        }"""
    )
    tab.page.wait_for_selector("#attachments li")
    assert tab.page.inner_text("#attachments .name") == "<b>.txt"


# ---------------------------------------------------------------- export and import


def test_conversations_are_exported_and_imported(tab: Tab, tmp_path: Path) -> None:
    tab.answer_with(*map(stream_of, ("one", "two")))
    page = tab.page
    tab.ask("first")
    tab.answer()
    page.click("button[aria-label='Answer again']")
    page.wait_for_selector("text=two")
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename.startswith("conversations-")
    download.value.save_as(tmp_path / "all.json")
    exported = json.loads((tmp_path / "all.json").read_text("utf-8"))
    assert (exported["format"], exported["version"]) == ("nanoserve.conversations", 1)
    page.evaluate("localStorage.clear()")
    page.reload()
    assert tab.titles() == []
    page.set_input_files("#import-file", tmp_path / "all.json")
    page.wait_for_selector("text=1 conversation imported.")
    page.set_input_files("#import-file", tmp_path / "all.json")
    page.wait_for_selector("text=All of its conversations are here already.")
    page.reload()
    assert tab.titles() == ["first"]
    page.click("#conversations .choose")
    assert shown(tab) == ["first", "two"]
    step(tab, "Earlier answer")
    assert shown(tab) == ["first", "one"]
    page.set_input_files("#import-file", files(other_json=b"{}"))
    page.wait_for_selector("text=“other.json” is not imported: its format is not")


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "x", "id": 1, "parent": None, **fields}


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        (None, "it is not an object"),
        ({"id": 5, "title": "t"}, "id is not a text"),
        ({"messages": {}}, "messages is not a list"),
        ({"messages": [[]]}, "messages[0] is not an object"),
        ({"messages": [message(role="robot")]}, "messages[0].role"),
        ({"messages": [message(content=5)]}, "messages[0].content is not a text"),
        ({"messages": [message(attachments=[{"name": "a"}])]}, "messages[0].attachments"),
        ({"messages": [message(id=0)]}, "messages[0].id is not a new number"),
        ({"messages": [message(), message()]}, "messages[1].id is not a new number"),
        ({"messages": [message(parent=1)]}, "messages[0].parent is not the id of an earlier"),
        ({"messages": [message(), message(id=2, parent=1)]}, "messages[1] has the role"),
        ({"messages": [message()], "leaf": 7}, "leaf is not the id"),
        ({"messages": [message()], "leaf": None}, "leaf is not the id"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_file_is_named(tab_of_module: Tab, conversation: Any, problem: str):
    if conversation is not None:
        conversation = {"id": "a", "title": "t", "messages": [], "leaf": 1} | conversation
    found = {"format": "nanoserve.conversations", "version": 1, "conversations": [conversation]}
    wrong = tab_of_module.page.evaluate(
        """async (text) => {
          const { imported } = await import("/page/exchange.js");
          try { imported(text); } catch (error) { return error.message; }
        }""",
        json.dumps(found),
    )
    assert wrong.startswith("conversations[0]: ") and problem in wrong


def test_an_import_takes_known_members_only(tab_of_module: Tab) -> None:
    answer = {"role": "assistant", "content": "", "parent": 1, "id": 2, "state": "waiting"}
    answer |= {"timing": {"tokens": "many"}, "context": -1, "format": "html", "notice": "wait"}
    conversation = {"id": "a", "title": "t", "messages": [message(evil=1), answer], "leaf": 2}
    taken = tab_of_module.page.evaluate(
        'async (found) => (await import("/page/checked.js")).checked(found)',
        conversation | {"__proto__x": 1},
    )
    assert taken == {
        "id": "a",
        "title": "t",
        "isNamed": False,
        "changed": 0,
        "messages": [
            {"role": "user", "content": "x", "id": 1, "parent": None},
            {"role": "assistant", "content": "", "id": 2, "parent": 1}
            | {"thinking": "", "state": "stopped"},
        ],
        "leaf": 2,
    }


def test_what_the_command_saves_can_be_imported(tab_of_module: Tab, tmp_path: Path) -> None:
    said = [{"role": role, "content": role} for role in ("user", "assistant")]
    save(tmp_path / "saved.json", "abc", said, {"model": "tiny", "system": None})
    taken = tab_of_module.page.evaluate(
        'async (text) => (await import("/page/exchange.js")).imported(text)',
        (tmp_path / "saved.json").read_text("utf-8"),
    )
    (conversation,) = taken
    assert conversation["title"] == "user" and conversation["leaf"] == 2
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant"]


# ---------------------------------------------------------------- parameters


def test_more_parameters_are_sent(tab: Tab) -> None:
    asked = tab.answer_with(stream_of("yes"))
    page = tab.page
    page.click("#open-settings")
    page.click("#more summary")
    values = {"min_p": "0.1", "repetition_penalty": "1.1", "presence_penalty": "-1"}
    values |= {"frequency_penalty": "0.5", "extra": '{"min_tokens": 2, "logit_bias": {"5": -1}}'}
    for name, value in values.items():
        page.fill(f"[name={name}]", value)
    page.click("#settings .primary")
    tab.ask("one")
    tab.answer()
    sent = {
        name: asked[0][name] for name in (*values, "min_tokens", "logit_bias") if name != "extra"
    }
    assert sent == {
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "min_tokens": 2,
        "logit_bias": {"5": -1},
    }
    page.reload()
    page.click("#open-settings")
    page.click("#more summary")
    page.fill("[name=extra]", '{"min_p": 1}')
    assert page.inner_text("#wrong-extra") == "min_p is set above, too. Set it once."
    page.click("#settings .close")
    page.click("#open-settings")
    page.click("#more summary")  # closed, so the field with the error cannot be seen
    page.click("#settings .close")
    tab.ask("two")
    assert page.is_visible("#wrong-extra") and len(asked) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" ", ""),
        ('{"min_tokens": 2}', ""),
        ("{", "This is not JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"messages": []}', "The page itself sets messages."),
        ('{"n": 2}', "cannot show what n brings"),
    ],
)
def test_other_fields_are_checked(tab_of_module: Tab, text: str, problem: str) -> None:
    script = 'async (text) => (await import("/page/extra.js")).extraIn(text).wrong'
    wrong = tab_of_module.page.evaluate(script, text)
    assert problem in wrong and bool(problem) == bool(wrong)


def test_the_context_in_use_is_shown(tab: Tab) -> None:
    answers = [(100, 20), (800, 100), (1000, 24)]
    tab.answer_with(
        *(ended("ok", prompt_tokens=a, completion_tokens=b) for a, b in answers), error(400, "no")
    )
    page = tab.page
    assert page.is_hidden("#context")
    texts = ["120 of 1,024 tokens of context used"]
    texts.append("900 of 1,024 tokens of context used: nearly full")
    texts += 2 * ["1,024 of 1,024 tokens of context used: it is full. Begin a new conversation."]
    for number, text in enumerate(texts):
        tab.ask(f"question {number}")
        page.wait_for_selector(f".assistant:not(.coming) >> nth={number}")
        assert page.inner_text("#context") == text
    assert page.get_attribute("#context-meter", "aria-valuenow") == "1024"
    page.keyboard.press("Control+k")
    assert page.is_hidden("#context")


def test_the_model_is_described(tab: Tab) -> None:
    page = tab.page
    tab.wait_for("document.getElementById('model').value === 'tiny'")
    page.click("#about-model")
    facts = page.inner_text("#model-facts")
    for fact in ("Qwen3ForCausalLM", "1,024 tokens", "float32"):
        assert fact in facts
    assert "the model reads only text" in page.inner_text("#model-limits")
    page.keyboard.press("Escape")
    assert page.is_hidden("#model-details")


# ---------------------------------------------------------------- code and formulas


@pytest.mark.parametrize(
    ("language", "code", "kinds"),
    [
        ("python", 'def f(x):\n  return f"a{x}" # no', "keyword name keyword string comment"),
        ("py", '"""a\nb""" + 0x1F', "string number"),
        ("ts", "const a = `x\ny`; // hi", "keyword string comment"),
        ("rust", "fn f<'a>() { 'c' }", "keyword string"),
        ("sh", 'echo "$A" $B a#b # c', "string string comment"),
        ("sql", "SELECT 'a' -- c", "keyword string comment"),
        ("json", '{"a": true, "b": 1}', "string keyword string number"),
        ("yaml", "it's: true # c", "keyword comment"),
        (
            "html",
            '<a href="x">it\'s</a><!-- c -->',
            "keyword string keyword keyword keyword comment",
        ),
        ("diff", "+a\n-b\n c", "added removed"),
        ("constructor", "if x", ""),
        ("", "if x", ""),
    ],
    ids=str,
)
def test_code_has_colours(tab_of_module: Tab, language: str, code: str, kinds: str) -> None:
    text, found = tab_of_module.page.evaluate(
        """async ([code, language]) => {
          const { coloured } = await import("/page/highlight.js");
          const made = document.createElement("code");
          made.append(...coloured(code, language));
          return [made.textContent, [...made.children].map((node) => node.className).join(" ")];
        }""",
        [code, language],
    )
    assert (text, found) == (code, kinds)


FORMULAS = r"""Inline $x_1 * y_1$ and \(a^2\), from $5 to $6 in $HOME/$USER, \$x\$.

$$
\frac{a}{b}
- c
$$

\[ \prescript{1}{2}{X} \]

`$code$` and $\href{javascript:alert(1)}{x}$ $\unknown{$ $\style{color:red}{x}$
$\includegraphics{x}$
"""


def test_formulas_are_shown_and_do_nothing_else(tab: Tab) -> None:
    tab.answer_with(stream_of(FORMULAS))
    tab.ask("one")
    tab.answer()
    tab.wait_for("document.querySelectorAll('#log math').length >= 4")
    page = tab.page
    paragraph = page.inner_text(".markdown p >> nth=0")
    assert "from $5 to $6 in $HOME/$USER, $x$." in paragraph and "$x_1" not in paragraph
    assert page.locator("#log math").count() == 4  # what is not LaTeX, or not harmless, is text
    assert page.locator("#log .display math[display=block]").count() == 2
    assert page.locator("#log mfrac").count() == 1 and page.locator("#log li").count() == 0
    assert page.locator("#log math :is(a, img, script, [href], [src], [id])").count() == 0
    assert "javascript:alert(1)" in page.inner_text(".markdown")
    assert page.inner_text(".markdown p:last-child code >> nth=0") == "$code$"


@FULL
def test_many_formulas_do_not_block_the_page(tab: Tab) -> None:
    many = " ".join(rf"$\frac{{{number}}}{{\sqrt{{x}}}}$" for number in range(1500))
    tab.answer_with(stream_of(many))
    tab.ask("one")
    tab.answer()
    tab.page.evaluate(
        """() => {
          window.longest = 0;
          let before = performance.now();
          window.ticks = setInterval(() => {
            longest = Math.max(longest, performance.now() - before);
            before = performance.now();
          }, 5);
        }"""
    )
    tab.wait_for("document.querySelectorAll('#log math').length === 1500")
    assert tab.page.evaluate("longest") < 3000


# ---------------------------------------------------------------- how it looks


@pytest.mark.small(width=[400])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_notice_covers_neither_the_field_nor_the_answer(tab: Tab, width: int) -> None:
    tab.resize(width, 700)
    page = tab.page
    tab.answer_with(stream_of("\n\n".join(f"line {number}" for number in range(40))))
    tab.ask("one")
    tab.answer()

    def box(selector: str) -> Any:
        return page.locator(selector).bounding_box()

    # The second file is attached, so the composer becomes higher.
    for attached, above in ((files(x_dat=b"\0"), "#composer .field"),
                            (files(a_txt=b"x", y_dat=b"\0"), "#attachments")):  # fmt: skip
        page.set_input_files("#attach-file", attached)
        page.wait_for_selector(f"text=“{attached[-1]['name']}” is not a text file")
        page.wait_for_timeout(100)
        notice = box("#toast")
        assert notice["y"] + notice["height"] <= box(above)["y"]
        actions = box("#log .assistant .actions")
        assert actions["y"] + actions["height"] <= notice["y"]
    if width < 1080:
        page.click("#menu")
        theme, notice = box("#theme"), box("#toast")
        assert theme["y"] + theme["height"] <= notice["y"]


def test_a_scrollbar_moves_nothing(tab: Tab) -> None:
    tab.resize(1280, 700)
    tab.answer_with(stream_of("short"), stream_of("\n\n".join("long" for _ in range(60))))
    places = []
    for question in ("one", "two"):
        tab.ask(question)
        tab.answer()
        log = tab.page.locator("#log").bounding_box()
        field = tab.page.locator("#composer .field").bounding_box()
        places.append((log["x"], log["width"], field["x"], field["width"]))
    assert places[0] == places[1]
    assert places[0][:2] == places[0][2:]  # the answers stand exactly above the field


def test_the_view_of_the_engine_explains_itself(tab: Tab) -> None:
    page = tab.page
    tab.wait_for("document.getElementById('caption').textContent !== ''")
    assert "idle" in page.inner_text("#caption")
    page.click("#explanation summary")
    explained = set(page.locator("#explanation dt").all_inner_texts())
    legend = [text.split()[0] for text in page.locator(".legend li").all_inner_texts()]
    assert {"in use" if word == "in" else word for word in legend} <= explained
    captions = page.evaluate(
        """async () => {
          const { captionOf } = await import("/page/caption.js");
          const numbers = { num_waiting: 0, num_held: 0 };
          const pool = { numShared: 0, numCachedFree: 3 };
          return [
            captionOf({ requests: [], numbers }, pool),
            captionOf({ requests: [[1, 20, 16, 20, 4]], numbers }, pool),
            captionOf({ requests: [[1, 20, 0, 8, 0], [2, 5, 0, 5, 1], [3, 5, 0, 5, 1]],
              numbers: { num_waiting: 2, num_held: 0 } }, { ...pool, numShared: 2 }),
          ];
        }"""
    )
    assert "grey blocks" in captions[0]
    assert "One request is generating" in captions[1] and "was in the cache" in captions[1]
    for part in ("is in prefill", "2 requests are generating", "corner", "2 requests are waiting"):
        assert part in captions[2]
