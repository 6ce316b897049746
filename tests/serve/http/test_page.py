"""The page at `/` in a real browser: one server and one Chromium for all of it."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from browser_tab import Tab, error, stream_of
from serving import Served, served, wait_until

pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.page import page_files

QUESTION = "What is a KV cache?"
FULL = pytest.mark.size("full")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = AsyncLLM("tiny-qwen3", num_kv_blocks=400)
    with served(llm, grace=0, served_model_name=[]) as one:
        yield one


# A real answer that goes on until it is stopped, or for some seconds.
ENDLESS = {"post": {"ignore_eos": True, "max_tokens": 1900}}


# ---------------------------------------------------------------- files


def fetch(url: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as response:
        return response.code, response.headers, response.read()


def test_files_come_with_a_policy_and_are_sent_once(server: Served) -> None:
    known = page_files()
    assert {"index.html", "main.js", "style.css", "icon.svg"} <= known.keys()
    for path in ("", *(f"page/{name}" for name in known)):
        status, headers, content = fetch(f"{server.url}/{path}")
        assert (status, content) == (200, known[path.removeprefix("page/") or "index.html"].content)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        etag = headers["etag"]
        assert fetch(f"{server.url}/{path}", **{"If-None-Match": etag})[::2] == (304, b"")
        assert fetch(f"{server.url}/{path}", **{"If-None-Match": f'"old", W/{etag}'})[0] == 304
        assert fetch(f"{server.url}/{path}", **{"If-None-Match": '"old"'})[0] == 200
        head = fetch(f"{server.url}/{path}", "HEAD")
        assert head[0] == 200 and head[2] == b"" and head[1]["etag"] == etag


@pytest.mark.parametrize(
    "path",
    [
        "page/",
        "page/page.py",
        "page/../page.py",
        "page/%2e%2e/page.py",
        "page/..%2fpage.py",
        "page/a%00",
    ],
)
def test_no_other_file_is_served(server: Served, path: str) -> None:
    status, _, content = fetch(f"{server.url}/{path}")
    assert status == 404 and b"import" not in content


def test_the_page_has_no_script_or_style_in_it_and_names_no_other_host() -> None:
    for name, file in page_files().items():
        text = file.content.decode()
        if name.endswith(".html"):
            assert not re.findall(r"<style|\sstyle=|\son\w+=|<script>", text)
        hosts = set(re.findall(r"https?://\w[\w.-]+", text)) - {"http://www.w3.org"}
        assert not hosts and not re.findall(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text
        )


# ---------------------------------------------------------------- a conversation


def test_an_answer_comes_piece_by_piece(tab: Tab) -> None:
    tab.wait_for("document.getElementById('model').value === 'tiny-qwen3'")
    tab.page.evaluate(
        """() => {
          window.lengths = new Set();
          const note = () => lengths.add(document.querySelector(".markdown")?.textContent.length);
          const log = document.getElementById("log");
          new MutationObserver(note).observe(log, { childList: true, subtree: true });
        }"""
    )
    tab.answer_with({"post": {"ignore_eos": True, "max_tokens": 600}})
    tab.page.click(f"text={QUESTION}")
    assert "keys and values" in tab.answer()
    assert tab.page.evaluate("lengths.size") > 6
    told = tab.page.inner_text("#log .timing")
    assert re.fullmatch(r"600 tokens · [\d,]+ tokens/s · first after [\d.]+ m?s", told), told
    assert tab.note() == "Cut off at the limit, after 600 tokens."
    assert tab.titles() == [QUESTION] and not tab.page.is_visible("#welcome")
    assert tab.page.get_attribute("#log > .assistant", "aria-busy") == "false"


def test_all_three_example_questions_are_answered(tab: Tab) -> None:
    for number in (1, 2, 3):
        tab.page.keyboard.press("Control+k")
        tab.page.click(f"#examples button:nth-child({number})")
        assert tab.answer() and tab.note() == ""
    assert tab.answer() == "27 + 45 = 72."
    assert len(tab.titles()) == 3


def test_escape_stops_an_answer_on_the_server_too_and_the_conversation_goes_on(tab: Tab) -> None:
    asked = tab.answer_with(ENDLESS, None)
    tab.ask(QUESTION)
    tab.wait_for("document.querySelector('.markdown')?.textContent.length > 40")
    assert tab.num_unfinished == 1 and tab.page.is_visible("#stop")
    tab.page.keyboard.press("Escape")
    assert len(tab.answer()) > 40 and tab.note() == "Stopped."
    wait_until(lambda: tab.num_unfinished == 0, seconds=3)
    tab.ask("What is 27 + 45?")
    assert tab.answer() and tab.note() == ""
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "user"]
    assert tab.page.locator("#log > article").count() == 4


def test_conversations_outlive_the_page_and_can_be_renamed_and_deleted(tab: Tab) -> None:
    tab.ask(QUESTION)
    answer = tab.answer()
    tab.page.keyboard.press("Control+k")
    tab.ask("What is a block table?")
    tab.answer()
    tab.page.reload()
    assert tab.titles() == ["What is a block table?", QUESTION]
    tab.page.click(f"#conversations >> text={QUESTION}")
    assert tab.answer() == answer
    tab.page.dblclick(f"#conversations >> text={QUESTION}")
    tab.page.fill("#conversations input", "All about <b>caches</b>")
    tab.page.keyboard.press("Enter")
    tab.page.hover("#conversations li:first-child")
    tab.page.click("#conversations li:first-child button[aria-label^=Delete]")
    assert tab.titles() == ["All about <b>caches</b>"]
    tab.page.click("text=Undo")
    tab.page.reload()
    assert tab.titles() == ["What is a block table?", "All about <b>caches</b>"]


def test_two_conversations_are_answered_at_the_same_time(tab: Tab) -> None:
    tab.answer_with(ENDLESS, None)
    tab.ask(QUESTION)
    tab.page.wait_for_selector("#conversations .running")
    tab.page.keyboard.press("Control+k")
    tab.ask("What is 27 + 45?")
    assert "72" in tab.answer()
    assert tab.page.locator("#conversations .running").count() == 1
    tab.page.click(f"#conversations >> text={QUESTION}")
    tab.page.click("#stop")
    tab.answer()
    assert tab.note() == "Stopped."


def test_an_answer_can_be_given_again_and_a_question_put_differently(tab: Tab) -> None:
    asked = tab.answer_with(*[stream_of(text) for text in ("one", "two", "three")])
    tab.ask("first")
    assert tab.answer() == "one"
    tab.page.click("button[aria-label='Answer again']")
    tab.page.wait_for_selector("text=two")
    tab.page.hover(".user")
    tab.page.click("button[aria-label='Edit and ask again']")
    tab.page.keyboard.press("Escape")
    assert tab.page.input_value("textarea[name=question]") == ""
    tab.page.hover(".user")
    tab.page.click("button[aria-label='Edit and ask again']")
    tab.ask("second")
    tab.page.wait_for_selector("text=three")
    said = [[message["content"] for message in request["messages"]] for request in asked]
    assert said == [["first"], ["first"], ["second"]]


def test_keys_and_parameters(tab: Tab) -> None:
    asked = tab.answer_with(stream_of("yes"))
    tab.page.click("#open-settings")
    for name, value in {
        "temperature": "0.5",
        "top_k": "7",
        "seed": "3",
        "system": "Be kind.",
    }.items():
        tab.page.fill(f"[name={name}]", value)
    tab.page.fill("[name=stop]", "END\nSTOP")
    tab.page.fill("[name=top_p]", "5")
    tab.page.click("#settings .primary")
    assert tab.page.is_visible("#settings")  # not with that top_p
    tab.page.fill("[name=top_p]", "0.9")
    tab.page.click("#settings .primary")
    tab.page.fill("textarea[name=question]", "")
    tab.page.click("textarea[name=question]")
    tab.page.keyboard.type("one")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("two")
    tab.page.keyboard.press("Enter")
    assert tab.answer() == "yes"
    assert asked == [
        {
            "model": "tiny-qwen3",
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "one\ntwo"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "seed": 3,
            "stop": ["END", "STOP"],
        }
    ]
    tab.page.reload()
    assert tab.page.input_value("[name=temperature]") == "0.5"


SCHEMA = {
    "type": "object",
    "properties": {
        "term": {"type": "string", "maxLength": 20},
        "level": {"enum": ["easy", "hard"]},
    },
    "required": ["term", "level"],
    "additionalProperties": False,
}


def set_schema(tab: Tab, text: str) -> None:
    tab.page.click("#open-settings")
    tab.page.fill("[name=schema]", text)
    tab.page.click("#settings .primary")


def test_json_by_a_schema_is_asked_for_and_set_out(tab: Tab) -> None:
    pieces = ('{"term": "block", ', '"n": [1, 2], "none": {}}')
    asked = tab.answer_with(*[stream_of(*pieces)] * 3)
    page = tab.page
    assert page.is_hidden("#has-schema")
    set_schema(tab, f"\ufeff {json.dumps(SCHEMA)}\n")
    assert page.is_hidden("#settings") and page.is_visible("#has-schema")
    tab.ask("one")
    tab.answer()
    described = {"name": "answer", "schema": SCHEMA}
    assert asked[0]["response_format"] == {"type": "json_schema", "json_schema": described}
    shown = json.dumps({"term": "block", "n": [1, 2], "none": {}}, indent=2)
    assert page.inner_text(".assistant pre code") == shown
    page.reload()
    assert "JSON" in page.inner_text("#has-schema")
    page.click("#conversations >> text=one")
    assert page.inner_text(".assistant pre code") == shown  # it is kept that this is JSON
    tab.ask("two")
    tab.answer()
    assert asked[1]["response_format"] == asked[0]["response_format"]
    page.click("#drop-schema")
    assert page.is_hidden("#has-schema") and page.input_value("[name=schema]") == ""
    assert page.evaluate("document.activeElement.name") == "question"
    tab.ask("three")
    assert tab.answer() == "".join(pieces)
    assert "response_format" not in asked[2]


def test_a_schema_that_is_switched_off_can_be_had_again(tab: Tab) -> None:
    page = tab.page
    set_schema(tab, json.dumps(SCHEMA))
    page.click("#drop-schema")
    page.reload()
    assert page.is_hidden("#has-schema")  # for good
    set_schema(tab, json.dumps(SCHEMA))
    page.click("#drop-schema")
    page.click("text=Undo")
    assert json.loads(page.input_value("[name=schema]")) == SCHEMA
    page.reload()
    assert page.is_visible("#has-schema")
    page.click("#open-settings")
    assert page.is_hidden("#example-schema")  # it would overwrite what is there
    page.click("#reset")
    assert page.is_visible("#example-schema") and page.is_hidden("#has-schema")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"type": ', "not JSON"),
        ('["object"]', "this is a list"),
        pytest.param("no JSON", "not JSON", marks=FULL),
        pytest.param('"object"', "this is a string", marks=FULL),
        pytest.param("null", "this is null", marks=FULL),
    ],
)
def test_what_is_no_schema_is_told_at_once_and_not_sent(tab: Tab, text: str, told: str) -> None:
    asked = tab.answer_with(stream_of("{}"), stream_of("{}"))
    page = tab.page
    page.click("#open-settings")
    page.fill("[name=schema]", text)
    assert told in page.inner_text("#wrong-schema")  # while it is being written
    assert page.get_attribute("[name=schema]", "aria-invalid") == "true"
    page.click("#settings .primary")
    assert page.is_visible("#settings")  # not with that schema
    page.click("#settings .close")
    assert "not a JSON object" in page.inner_text("#has-schema")
    tab.ask("one")
    assert page.is_visible("#settings") and told in page.inner_text("#wrong-schema")
    page.fill("[name=schema]", "{}")
    assert page.inner_text("#wrong-schema") == ""
    page.click("#settings .primary")
    assert page.input_value("[name=question]") == "one" and asked == []  # nothing is lost
    page.press("[name=question]", "Enter")
    tab.answer()
    assert [body["response_format"]["json_schema"]["schema"] for body in asked] == [{}]


def test_json_is_shown_as_it_comes(tab: Tab) -> None:
    """From a server that takes its time, and one that stops in the middle."""
    tab.page.evaluate(
        """() => {
          const events = (text) => {
            const chunk = { choices: [{ index: 0, delta: { content: text } }] };
            return new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`);
          };
          const real = window.fetch;
          window.fetch = (path, options) => {
            if (!String(path).includes("chat/completions")) return real(path, options);
            const body = new ReadableStream({ start(controller) {
              window.say = (text) => controller.enqueue(events(text));
              window.end = () => controller.close();
            } });
            return Promise.resolve(new Response(body));
          };
        }"""
    )
    set_schema(tab, json.dumps(SCHEMA))
    tab.ask("one")
    tab.wait_for("window.say !== undefined")
    shown = "document.querySelector('.assistant pre code')?.textContent"
    so_far = ""
    for piece in ('{"term"', ': "``` ', '````", "lev', 'el": 1}'):
        so_far += piece
        tab.page.evaluate("(piece) => say(piece)", piece)
        tab.wait_for(f"{shown} === {json.dumps(so_far)}")
        assert tab.page.locator(".markdown > *").count() == 1
    tab.page.evaluate("end()")  # before it has said [DONE]
    tab.answer()
    assert "before its end" in tab.note()
    assert tab.page.inner_text("pre code") == json.dumps(json.loads(so_far), indent=2)
    assert tab.page.locator(".markdown > *").count() == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"a":[1,{"b":"x, {y}: [z]"}],"c":{},"d":[ ]}', None),
        ('[true,false,null,-1.5,"\\"","\\\\"]', None),
        (' "only a text" ', '"only a text"'),
        # Parsed and written anew these would be others.
        ("[12345678901234567890, 1.0]", "[\n  12345678901234567890,\n  1.0\n]"),
        ('{"a": 1, "a": 2}', '{\n  "a": 1,\n  "a": 2\n}'),
        # What is no JSON, or not all of it.
        ('{"a": [1, ', '{"a": [1, '),
        ("It is 7.", "It is 7."),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_json_is_set_out_as_it_is_written(tab_of_module: Tab, text: str, shown: str | None) -> None:
    set_out = 'async (text) => (await import("/page/json.js")).setOut(text)'
    expected = json.dumps(json.loads(text), indent=2) if shown is None else shown
    assert tab_of_module.page.evaluate(set_out, text) == expected


def test_json_of_many_levels_does_not_take_long(tab_of_module: Tab) -> None:
    length, took = tab_of_module.page.evaluate(
        """async () => {
          const { setOut } = await import("/page/json.js");
          const start = performance.now();
          const text = "[".repeat(5000) + `"${"\\\\".repeat(1e6)}"` + "]".repeat(5000);
          return [setOut(text).length, performance.now() - start];
        }"""
    )
    assert length < 3_500_000 and took < 2000


def test_the_model_answers_by_a_schema(tab: Tab) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    page = tab.page
    set_schema(tab, json.dumps(SCHEMA))
    tab.ask(QUESTION)
    tab.answer()
    told = json.loads(page.inner_text(".assistant pre code"))
    assert told.keys() == {"term", "level"} and told["level"] in ("easy", "hard")
    assert len(told["term"]) <= 20 and tab.note() == ""
    page.click("#open-settings")
    page.click("#reset")
    page.click("#example-schema")
    page.click("#settings .primary")
    page.keyboard.press("Control+k")
    tab.ask(QUESTION)
    tab.answer()
    told = json.loads(page.inner_text(".assistant pre code"))
    assert told.keys() == {"term", "difficulty", "is_about_memory"}


def test_what_the_server_says_of_a_schema_is_shown(tab: Tab) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    set_schema(tab, '{"type": "array", "uniqueItems": true}')
    tab.ask(QUESTION)
    tab.wait_for("[...document.querySelectorAll('.note.error')].length === 1")
    assert "uniqueItems" in tab.note()


def test_thoughts_are_folded_and_not_sent_again(tab: Tab) -> None:
    asked = tab.answer_with(
        stream_of("<think>\nIt is\n", "easy.</think>\n\nYes."),
        stream_of("No.", reasoning_content="Now it is hard."),
    )
    tab.ask("Is it?")
    assert tab.answer() == "Yes."
    assert tab.page.get_attribute("details.thinking", "open") is None
    tab.page.click("details.thinking summary")
    assert tab.page.inner_text(".thought") == "It is\neasy."
    tab.ask("Really?")
    tab.page.wait_for_selector("text=No.")
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "Yes."}
    assert tab.page.locator("details.thinking:visible").count() == 2


def test_what_the_browser_does_not_keep_is_there_while_the_page_is(open_tab: Any) -> None:
    refuse = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('no'); } });"
    tab = open_tab(script=refuse)
    tab.ask(QUESTION)
    assert tab.answer()
    assert "cannot store" in tab.page.inner_text("#toast")
    tab.page.keyboard.press("Control+k")
    assert tab.titles() == [QUESTION]


# ---------------------------------------------------------------- what goes wrong


def test_what_the_server_refuses_is_told_in_its_words(tab: Tab) -> None:
    tab.page.evaluate("localStorage.setItem('nanoserve.settings', '{\"max_tokens\": \"99999\"}')")
    tab.page.reload()
    tab.ask(QUESTION)
    tab.answer()
    assert "99999 in the completion" in tab.note()  # the real server's


@pytest.mark.parametrize(
    ("response", "told"),
    [
        ("abort", "cannot be reached"),
        (stream_of("Half an", end='data: {"error": {"message": "on fire"}}\n\n'), "on fire"),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                (stream_of("Half an", end=""), "ended the answer before its end"),
                ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "status 502"),
                (error(429, "too many", **{"Retry-After": "3600"}), "too many"),
            )
        ),
    ],
)
def test_an_answer_that_fails_says_why_and_can_be_asked_for_again(
    tab: Tab, response: Any, told: str
) -> None:
    tab.answer_with(response, stream_of("All is well."))
    tab.ask(QUESTION)
    tab.answer()
    assert told in tab.note()
    tab.page.click("button[aria-label='Answer again']")
    tab.page.wait_for_selector("text=All is well.")


def test_a_busy_server_is_asked_again_when_it_says(tab: Tab) -> None:
    busy = error(429, "Too many requests.", **{"Retry-After": "1"})
    asked = tab.answer_with(busy, stream_of("At last."))
    tab.ask(QUESTION)
    tab.page.wait_for_selector("text=Too many requests. Trying again in 1 s.")
    assert tab.answer() == "At last." and len(asked) == 2 and tab.note() == ""


def test_a_key_is_asked_for_and_kept_for_the_session_only(tab: Tab) -> None:
    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        else:
            route.fulfill(**error(401, "a key is needed"))

    for path in ("**/v1/**", "**/live"):
        tab.page.route(path, guard)
    tab.page.reload()
    tab.page.fill("[name=key]", "wrong")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#wrong-key:visible")
    tab.page.fill("[name=key]", "right")
    tab.page.keyboard.press("Enter")
    tab.wait_for("document.getElementById('model').value === 'tiny-qwen3'")
    tab.ask(QUESTION)
    assert "keys and values" in tab.answer()
    kept = tab.page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert "right" not in kept[0] and "right" in kept[1]


# ---------------------------------------------------------------- what a model writes


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](JaVaScRiPt:alert(1)) [d](//evil.example)",
    "![picture](https://evil.example/tracker.png)",
    '[x](https://evil.example/" onmouseover="alert(1))',
    "`<b>` <iframe src=//evil.example> <style>*{display:none}</style>",
    "| <img src=x> | b |\n|---|---|\n| <svg onload=alert(1)> | [l](javascript:1) |",
    "```<script>\nalert(1)\n```",
]


def test_what_a_model_writes_stays_text(tab: Tab) -> None:
    tab.answer_with(stream_of(*(f"{text}\n\n" for text in HOSTILE)))
    tab.ask("</textarea><img src=x onerror=alert(1)>")
    shown = tab.answer()
    assert tab.page.locator("#log :is(img, script, iframe, style, svg[onload])").count() == 0
    for text in ("<img src=x onerror=alert(1)>", "</script>", "javascript:alert(1)", "<iframe"):
        assert text in shown
    links = tab.page.eval_on_selector_all(
        "#log a", "all => all.map(a => [a.href, a.rel, a.target])"
    )
    assert links and all(re.match("https?://evil.example/", link[0]) for link in links)
    assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer", "_blank")}
    assert tab.page.inner_text("#log .bubble") == "</textarea><img src=x onerror=alert(1)>"


@pytest.mark.parametrize(
    "text",
    [
        "> " * 100_000,
        ">" * 100_000,
        "*" * 100_000,
        "* " * 100_000,
        "*a " * 60_000,
        "**a _b " * 30_000,
        "a** " * 60_000,
        "[" * 100_000,
        "[a](" * 50_000,
        "](" * 50_000,
        "`a``b```c" * 20_000,
        "`a" * 100_000,
        "".join("`" * n + " " for n in range(440)),
        "\n".join(" " * min(n, 300) + "- x" for n in range(2000)),
        "http://" * 20_000,
        "http://a " * 10_000,
        "|" * 50_000 + "\n" + "|-" * 50_000,
        "~" * 100_000,
        "\\" * 100_000,
        "$" * 100_000,
        "$a" * 50_000,
        "$a$ " * 25_000,
        "\\(" * 50_000,
        "$$\na\n" * 20_000,
        "```py\n" + "'" * 100_000,
        "```py\n" + "f(1) " * 5_000,
        " " * 100_000 + "x",
        "1. " * 50_000,
        "# " * 50_000,
        "_a" * 60_000,
    ],
    ids=lambda text: repr(text[:9]),
)
def test_no_text_takes_long_to_show(tab_of_module: Tab, text: str) -> None:
    took = tab_of_module.page.evaluate(
        """async (text) => {
          const { showMarkdown } = await import("/page/markdown.js");
          const container = document.createElement("div");
          let took = Infinity;
          for (let tries = 0; took > 2000 && tries < 4; tries++) {  // on a busy machine
            const start = performance.now();
            showMarkdown(container, text);
            took = performance.now() - start;
          }
          const deepest = (node) => {
            let depth = 0;
            let level = [node];
            for (; level.length; depth++) level = level.flatMap((n) => [...n.children]);
            return depth;
          };
          return [took, deepest(container)];
        }""",
        text,
    )
    assert took[0] < 2000 and took[1] < 40, took


LINK = 'target="_blank" rel="noopener noreferrer"'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        (
            "a *b* **c** ~~e~~ `f*g*`",
            "a <em>b</em> <strong>c</strong> <del>e</del> <code>f*g*</code>",
        ),
        ("***d*** _e_ __f__", "<strong><em>d</em></strong> <em>e</em> <strong>f</strong>"),
        ("snake_case_name 2 * 3 * 4 \\*x\\*", "snake_case_name 2 * 3 * 4 *x*"),
        ("**bold *both***", "<strong>bold <em>both</em></strong>"),
        ("*open **and [not closed", "*open **and [not closed"),
        ("``a ` b``", "<code>a ` b</code>"),
        ("[a *b*](https://x.org/y)", f'<a href="https://x.org/y" {LINK}>a <em>b</em></a>'),
        ("see https://x.org/z.", f'see <a href="https://x.org/z" {LINK}>https://x.org/z</a>.'),
    ],
)
def test_markdown_in_a_line(tab_of_module: Tab, text: str, html: str) -> None:
    assert tab_of_module.markdown(text) == f"<p>{html}</p>"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# One\ntext\nmore\n\n---", "<h2>One</h2><p>text\nmore</p><hr>"),
        ("> quote\n> # One", "<blockquote><p>quote</p><h2>One</h2></blockquote>"),
        ("- a\n- b\n  1. c\n- e", "<ul><li>a</li><li>b<ol><li>c</li></ol></li><li>e</li></ul>"),
        ("3. c\n\n4. d", '<ol start="3"><li><p>c</p></li><li><p>d</p></li></ol>'),
        ("- a\n  continued\n\nend", "<ul><li>a\ncontinued</li></ul><p>end</p>"),
        ("", ""),
    ],
)
def test_markdown(tab_of_module: Tab, text: str, html: str) -> None:
    assert tab_of_module.markdown(text) == html


def test_code_and_tables(tab_of_module: Tab) -> None:
    code = tab_of_module.markdown("```py\nif a < b:\n    *x*\n\n~~~\n```\nafter")
    assert "<span>py</span>" in code
    keyword = '<span class="keyword">if</span>'
    assert f'<pre tabindex="0"><code>{keyword} a &lt; b:\n    *x*\n\n~~~</code></pre>' in code
    assert code.endswith("<p>after</p>")
    assert "<code>still open</code>" in tab_of_module.markdown("```\nstill open")
    table = tab_of_module.markdown("| a | b |\n|---|--:|\n| 1 | **2** |\nafter")
    assert '<td class="right"><strong>2</strong></td>' in table and "<p>after</p>" in table


def test_a_text_that_grows_ends_as_if_it_had_come_at_once(tab_of_module: Tab) -> None:
    """And what is whole is left as it is, with what somebody has selected in it."""
    text = (
        "# T\n\nfirst *one*\n\n- a\n- b\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nend"
    )
    grown, is_kept = tab_of_module.page.evaluate(
        """async (text) => {
          const { showMarkdown } = await import("/page/markdown.js");
          const container = document.createElement("div");
          let [keep, heading] = [[], null];
          for (let end = 0; end <= text.length; end++) {
            keep = showMarkdown(container, text.slice(0, end), keep);
            if (end === 20) heading = container.firstChild;
          }
          return [container.innerHTML, container.firstChild === heading];
        }""",
        text,
    )
    assert grown == tab_of_module.markdown(text) and is_kept


def test_events_may_be_cut_anywhere(tab_of_module: Tab) -> None:
    stream = (
        ": a comment\n\ndata: eins\r\ndata: zwei\r\n\r\n"
        "event: e\ndata: 块\ndata:表\n\nid: 3\nretry: 1\n\n"
        "data\rdata: ✓\r\rdata: [DONE]\n\ndata: not whole"
    )
    expected = [
        ["message", "eins\nzwei"],
        ["e", "块\n表"],
        ["message", "\n✓"],
        ["message", "[DONE]"],
    ]
    read = """async ([text, size]) => {
      const { eventsOf } = await import("/page/sse.js");
      const bytes = new TextEncoder().encode(text);
      const body = new ReadableStream({ start(controller) {
        for (let at = 0; at < bytes.length; at += size) {
          controller.enqueue(bytes.slice(at, at + size));
        }
        controller.close();
      } });
      const found = [];
      for await (const { name, data } of eventsOf(body)) found.push([name, data]);
      return found;
    }"""
    for size in (1, 2, 3, 5, 7, 1000):
        assert tab_of_module.page.evaluate(read, [stream, size]) == expected


# ---------------------------------------------------------------- how it looks


LONG = (
    "A_word_that_is_long_" * 20
    + "\n\n```\n"
    + "code " * 80
    + "\n```\n\n"
    + "|a" * 30
    + "|\n"
    + "|-" * 30
    + "|\n"
)


@pytest.mark.small(width=[360])
@pytest.mark.parametrize("width", [360, 900, 1300])
def test_nothing_is_wider_than_the_screen(tab: Tab, width: int) -> None:
    tab.resize(width, 640)
    tab.answer_with(stream_of(LONG))
    tab.ask("a_long_question_" * 30)
    tab.answer()
    over = (
        "[...document.querySelectorAll('body, body > *, #scroller, #log > *, #engine')]"
        ".filter((node) => node.scrollWidth > node.clientWidth + 1)"
        ".map((node) => node.outerHTML.slice(0, 80))"
    )
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.page.evaluate(over) == []
    if width < 760:
        assert not tab.page.is_visible("#engine")
        tab.page.click("[data-tab=engine]")
        tab.wait_for("document.getElementById('num-free').textContent !== '–'")
        box = tab.page.locator("#engine").bounding_box()
        assert (box["x"], box["width"]) == (0, width) and not tab.page.is_visible("#chat")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate(over) == []
    if width < 1080:
        tab.page.click("#menu")
        tab.page.click("#new")
        tab.page.wait_for_selector("#sidebar", state="hidden")


@pytest.mark.small(width=[360])
@pytest.mark.parametrize("width", [360, 400, 1280])
def test_a_schema_is_no_wider_than_the_screen(tab: Tab, width: int) -> None:
    tab.resize(width, 640)
    page = tab.page
    over = (
        "[...document.querySelectorAll('body, #composer, #has-schema, #settings, #settings form')]"
        ".filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.id)"
    )
    page.click("#open-settings")
    page.fill("[name=schema]", "no_JSON_but_a_long_word" * 20)
    assert page.is_visible("#wrong-schema") and page.evaluate(over) == []
    page.click("#settings .close")
    assert page.is_visible("#drop-schema") and page.evaluate(over) == []
    page.click("#drop-schema")
    assert page.is_visible("text=Undo") and page.evaluate(over) == []


def test_dark_and_light(tab: Tab) -> None:
    ground = "parseInt(getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/)[0])"
    for scheme, is_dark in (("dark", True), ("light", False)):
        tab.start_again()
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.reload()
        assert (tab.page.evaluate(ground) < 128) is is_dark
        tab.page.click("#theme")
        assert (tab.page.evaluate(ground) < 128) is not is_dark
        tab.page.reload()
        assert (tab.page.evaluate(ground) < 128) is not is_dark


def test_every_button_and_field_has_a_name(tab: Tab) -> None:
    tab.ask(QUESTION)
    tab.answer()
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select")].filter((node) =>
          !node.textContent.trim() && !node.getAttribute("aria-label") && !node.labels?.length
        ).map((node) => node.outerHTML.slice(0, 100))"""
    )
    assert nameless == []


# ---------------------------------------------------------------- the engine, live


@pytest.fixture
def slow_steps(server: Served) -> Iterator[None]:
    """A browser on a busy machine looks seldom: a request is not to be over before it has."""
    observers = server.api.llm.engine.observers
    observers.append(wait := lambda *step: time.sleep(0.01))
    yield
    observers.remove(wait)


@pytest.mark.usefixtures("slow_steps")
def test_the_engine_is_seen_at_work(tab: Tab) -> None:
    page = tab.page
    tab.answer_with(ENDLESS, stream_of("done"))
    tab.wait_for("document.getElementById('num-free').textContent !== '–'")
    picture = "document.getElementById('pool').toDataURL()"
    num_used = "Number(document.getElementById('num-used').textContent)"
    before = page.evaluate(picture)
    tab.ask(QUESTION)
    tab.wait_for(f"{num_used} > 3")
    first, num_first = page.evaluate(f"[{picture}, {num_used}]")
    tab.wait_for(f"{num_used} > {num_first}")
    second = page.evaluate(picture)
    assert len({before, first, second}) == 3
    assert page.inner_text("#num-running") == "1" and page.inner_text("#rate") != "0"
    assert re.search(r"#\d+", page.inner_text("#requests li"))
    # A block that the request holds, by the picture, says so.
    box = page.locator("#pool").bounding_box()
    page.hover("#requests li")
    page.wait_for_selector("#requests li.chosen")
    told = set()
    for number in range(16):
        page.mouse.move(box["x"] + 8 + 17 * number, box["y"] + 8)
        page.wait_for_timeout(40)
        told.add(page.inner_text("#hint"))
    assert any(re.search(r"Block \d+ is number \d+ in the table of #\d+", text) for text in told)
    page.keyboard.press("Escape")
    tab.wait_for("document.getElementById('num-used').textContent === '0'")
    assert int(page.inner_text("#num-cached")) > 0 and page.inner_text("#num-running") == "0"
    manager = tab.engine.scheduler.block_manager
    num_cached = sum(map(manager.prefix_cache.has, range(1, manager.num_blocks + 1)))
    tab.wait_for(f"document.getElementById('num-cached').textContent === '{num_cached}'")


def test_who_does_not_look_does_not_watch(tab: Tab) -> None:
    observers = tab.engine.observers

    def num_watching() -> int:
        return sum("StepTotals" in repr(observer) for observer in observers)

    def wait_for(number: int) -> None:
        end = time.monotonic() + 10
        while num_watching() != number and time.monotonic() < end:
            tab.page.wait_for_timeout(50)  # which lets the browser work
        assert num_watching() == number

    wait_for(1)
    tab.page.click("#toggle-engine")
    wait_for(0)
    tab.page.reload()
    tab.page.wait_for_timeout(300)
    wait_for(0)  # it stays as it was
    tab.page.click("#toggle-engine")
    wait_for(1)
    tab.page.goto("about:blank")
    tab.wrong.clear()
    wait_for(0)


def test_a_pool_of_many_blocks_is_drawn_several_to_a_square(tab_of_module: Tab) -> None:
    shown = tab_of_module.page.evaluate(
        """async () => {
          const { Pool } = await import("/page/pool.js");
          const { PoolCanvas } = await import("/page/pool_canvas.js");
          const frame = document.createElement("div");
          frame.style.width = "320px";
          const canvas = document.createElement("canvas");
          frame.append(canvas);
          document.body.append(frame);
          const pool = new Pool();
          const drawn = new PoolCanvas(canvas, pool);
          const ink = { free: "#fff", cached: "#888", fresh: "#000" };
          const found = [];
          for (const num_blocks of [1, 64, 3000, 100000]) {
            const sizes = { num_blocks, block_size: 16 };
            pool.load({ pool: sizes, tables: { 1: [1, 1] }, cached: [1, num_blocks] });
            const start = performance.now();
            drawn.draw(ink);
            const took = performance.now() - start;
            const rows = Math.ceil(num_blocks / drawn.perCell / drawn.columns);
            const last = drawn.blocksAt(1, 1);
            found.push([drawn.perCell, rows * drawn.cell, drawn.columns * drawn.cell, took, last]);
          }
          frame.remove();
          return found;
        }"""
    )
    for per_cell, height, width, took, first_cell in shown:
        assert height <= 305 and width <= 320 and took < 500 and first_cell == [1, per_cell]
    assert [per_cell for per_cell, *_ in shown[:3]] == [1, 1, 1] and shown[3][0] > 10


def test_of_many_blocks_only_those_with_content_are_drawn(tab_of_module: Tab) -> None:
    shown = tab_of_module.page.evaluate(
        """async () => {
          const { Pool } = await import("/page/pool.js");
          const { PoolCanvas } = await import("/page/pool_canvas.js");
          const frame = document.createElement("div");
          frame.style.width = "320px";
          const canvas = document.createElement("canvas");
          frame.append(canvas);
          document.body.append(frame);
          const pool = new Pool();
          const drawn = new PoolCanvas(canvas, pool);
          const sizes = { num_blocks: 100000, block_size: 16 };
          pool.load({ pool: sizes, tables: { 1: [900, 2, 7, 1] }, cached: [7, 1, 5000, 1] });
          drawn.draw({ free: "#fff", cached: "#888", fresh: "#000" });
          const places = [0, 1, 2, 3, 4].map((i) => drawn.blocksAt(1 + i * drawn.cell, 1));
          frame.remove();
          return [drawn.perCell, drawn.cell, places];
        }"""
    )
    assert shown == [1, 20, [[7, 7], [900, 900], [901, 901], [5000, 5000], None]]
