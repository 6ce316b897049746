"""Files of requests and answers for `nanoserve batch`, and the command as a process."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

OPTIONS = ["--dtype", "float32", "--max-num-seqs", "32", "--num-kv-blocks", "1000"]
OPTIONS += ["--max-model-len", "1024"]


def line(custom_id: Any, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    """Texts are written as they are."""
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def small_requests(number: int) -> list[dict[str, Any]]:
    """Completions and conversations, greedy and sampled, of a few tokens each."""
    rng = random.Random(number)
    lines = []
    for index in range(number):
        wishes = {"max_tokens": rng.randint(1, 6), "temperature": index % 2}
        if index % 3:
            prompt = f"A cache of {rng.randrange(1000)} blocks"
            lines.append(line(f"request-{index}", prompt=prompt, **wishes))
        else:
            said = [{"role": "user", "content": f"What is {rng.randrange(50)} + 3?"}]
            chat = "/v1/chat/completions"
            lines.append(line(f"request-{index}", chat, messages=said, **wishes))
    return lines


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """By custom_id; that nothing is answered twice, or half, is checked."""
    content = path.read_text(encoding="utf-8")
    assert not content or content.endswith("\n")
    lines = [json.loads(text) for text in content.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def texts(path: Path) -> dict[str, Any]:
    """What each answer says, without what differs from run to run."""
    bodies = {key: each["response"]["body"] for key, each in answers(path).items()}
    return {key: without_names(body) for key, body in bodies.items()}


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    """A body without its id, its time, and what of its prompt was cached."""
    usage = {k: v for k, v in body.get("usage", {}).items() if k != "prompt_tokens_details"}
    kept = {k: v for k, v in body.items() if k not in ("id", "created")}
    return json.loads(_without_call_ids(kept | {"usage": usage}))


def _without_call_ids(body: dict[str, Any]) -> str:
    for choice in body.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls") or ():
            call["id"] = "call"
    return json.dumps(body)


def start(source: Path, out: Path, *arguments: str) -> "subprocess.Popen[str]":
    """The command as a process of its own."""
    command = [sys.executable, "-m", "nanoserve", "batch", str(source), str(out)]
    return subprocess.Popen([*command, *OPTIONS, *arguments], stderr=subprocess.PIPE, text=True)
