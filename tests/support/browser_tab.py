"""A page in a headless Chromium, with all that went wrong with it."""

import json
import time
from typing import Any

from serving import Served, wait_until

from nanoserve.engine.guard import GuardedEngine

TIMEOUT = 60_000  # milliseconds that something may take
SIZE = {"width": 1300, "height": 800}


class Tab:
    """A page, and all that went wrong with it or left this machine."""

    def __init__(self, browser: Any, server: Served, script: str = "", **options: Any) -> None:
        options.setdefault("viewport", SIZE)
        self.server = server
        self.context = browser.new_context(permissions=["clipboard-read"], **options)
        self.context.set_default_timeout(TIMEOUT)
        self.page = page = self.context.new_page()
        self.wrong: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.wrong.append(f"raised: {error}"))
        page.on("request", lambda request: self._look_at(request.url))
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) =>"
            " console.error('refused by the policy: ' + event.blockedURI));" + script
        )
        page.goto(server.url)

    def start_again(self) -> None:
        """Make the page what it is in a new browser: a third of the time of a new tab."""
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.goto(f"{self.server.url}/version")  # leaves the page, which stores things then
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.set_viewport_size(SIZE)
        self.page.emulate_media(color_scheme="light")
        self.page.mouse.move(0, 0)
        wait_until(lambda: self.num_unfinished == 0)
        self.page.goto(self.server.url)

    def resize(self, width: int, height: int) -> None:
        self.page.set_viewport_size({"width": width, "height": height})

    @property
    def engine(self) -> GuardedEngine:
        return self.server.api.llm.engine

    @property
    def num_unfinished(self) -> int:
        return len(self.engine.output_processor.requests)

    def _note(self, message: Any) -> None:
        # An answer such as 429 is logged by the browser itself; the page cannot help it.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.wrong.append(message.text)

    def _look_at(self, url: str) -> None:
        if not url.startswith((f"{self.server.url}/", "data:", "blob:")):
            self.wrong.append(f"asked for {url}")

    def wait_for(self, expression: str) -> None:
        """Until it is true. Playwright's own way evaluates strings, which the policy forbids."""
        end = time.monotonic() + TIMEOUT / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"this took too long: {expression}"
            self.page.wait_for_timeout(20)

    def ask(self, question: str) -> None:
        self.page.fill("textarea[name=question]", question)
        self.page.press("textarea[name=question]", "Enter")

    def answer(self) -> str:
        """The last answer, when it is whole."""
        self.page.wait_for_selector("#log > .assistant:last-child:not(.coming)", timeout=TIMEOUT)
        return self.page.inner_text("#log > .assistant:last-child .markdown")

    def note(self) -> str:
        return self.page.inner_text("#log > .assistant:last-child .note")

    def titles(self) -> list[str]:
        return self.page.locator("#conversations .choose").all_inner_texts()

    def answer_with(self, *responses: Any) -> list[dict[str, Any]]:
        """Answer questions with these, one after the other; returns what was asked."""
        left, asked = list(responses), []

        def handle(route: Any) -> None:
            asked.append(json.loads(route.request.post_data))
            response = left.pop(0)
            if response is None:
                route.continue_()
            elif isinstance(response, dict) and "post" in response:
                route.continue_(post_data=json.dumps(asked[-1] | response["post"]))
            elif response == "abort":
                route.abort()
            else:
                route.fulfill(**response)

        self.page.route("**/v1/chat/completions", handle)
        return asked

    def markdown(self, text: str) -> str:
        """What the page makes of it, as HTML."""
        return self.page.evaluate(
            """async (text) => {
              const { showMarkdown } = await import("/page/markdown.js");
              const container = document.createElement("div");
              showMarkdown(container, text);
              return container.innerHTML;
            }""",
            text,
        )


def stream_of(*pieces: str, end: str = "data: [DONE]\n\n", **delta: str) -> dict[str, Any]:
    """A response that brings an answer in pieces."""
    deltas = [{"content": piece} for piece in pieces] + ([delta] if delta else [])
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return {"body": events + end, "content_type": "text/event-stream"}


def error(status: int, message: str, **headers: str) -> dict[str, Any]:
    return {"status": status, "headers": headers, "json": {"error": {"message": message}}}
