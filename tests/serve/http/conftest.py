"""One server for the tests of a module that need nothing special of it, and a browser."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser_tab import Tab
from serving import Served, served

from nanoserve.serve.async_llm import AsyncLLM

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)

OPTIONS = {"dtype": "float32", "max_num_seqs": 32, "num_kv_blocks": 1000, "max_model_len": 1024}


@pytest.fixture(scope="module")
def server_llm():
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(server_llm):
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    with served(server_llm) as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    reason = "needs `pip install playwright`; the browser is the system's"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    if CHROMIUM is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox"],
            ignore_default_args=["--hide-scrollbars"],  # they take room, as on most computers
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def _tab(browser: Any, server: Served) -> Iterator[Tab]:
    tab = Tab(browser, server)
    yield tab
    tab.context.close()


@pytest.fixture
def tab(_tab: Tab) -> Iterator[Tab]:
    """A page on which nothing has happened yet."""
    _tab.start_again()
    yield _tab
    wrong = [*_tab.wrong]
    _tab.wrong.clear()
    assert wrong == []


@pytest.fixture
def open_tab(browser: Any, server: Served) -> Iterator[Callable[..., Tab]]:
    """For pages with options of their own."""
    with contextlib.ExitStack() as closing:
        tabs: list[Tab] = []

        def opened(**options: Any) -> Tab:
            tabs.append(Tab(browser, server, **options))
            closing.callback(tabs[-1].context.close)
            return tabs[-1]

        yield opened
        assert [tab.wrong for tab in tabs] == [[] for _ in tabs]


@pytest.fixture
def tab_of_module(_tab: Tab) -> Iterator[Tab]:
    """A page on which other tests have been: for functions of its modules."""
    if _tab.page.url != f"{_tab.server.url}/":
        _tab.start_again()
    yield _tab
    assert _tab.wrong == []
