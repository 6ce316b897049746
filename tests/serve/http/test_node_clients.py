"""Vercel's AI SDK in Node.js with each of the three APIs."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_model import scripted_llm
from serving import served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

pytestmark = pytest.mark.size("full")

PROGRAM = Path(__file__).parents[2] / "support" / "ai_sdk.cjs"
PACKAGES = "ai zod @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REPORT = '{"text": "It is sunny", "level": 3}'
AS_CALL = f'<tool_call>\n{{"name": "json", "arguments": {REPORT}}}\n</tool_call>'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    reason = f"needs Node.js, npm install {PACKAGES} and NODE_PATH=.../node_modules"
    folders = [Path(one) for one in os.environ.get("NODE_PATH", "").split(os.pathsep) if one]
    names = PACKAGES.split()
    if shutil.which("node") is None or not all(
        any((folder / name).exists() for folder in folders) for name in names
    ):
        pytest.skip(reason)
    with scripted_llm(max_model_len=2048) as (llm, script):
        script.texts |= {"call": CALL, "report": REPORT, "as-call": AS_CALL}
        with served(llm) as server:
            yield server.url


@pytest.mark.parametrize("api", ["chat_completions", "responses", "messages"])
def test_the_ai_sdk(url: str, api: str) -> None:
    """Tools over several steps, whole and streamed, and an object by a schema."""
    command = ["node", str(PROGRAM), url, api]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["asked"] == ["Paris"] * 2
    assert told["texts"] == [REPORT] * 2
    assert told["object"] == json.loads(REPORT)
    assert told["numTokens"][0] == told["numTokens"][1] > 0
