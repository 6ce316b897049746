"""Records the stream that a client receives, with the server's protocol code and the bundled model.

`python docs/21-server/wire.py` writes `stream.txt` again. It needs the extra `serve`. The id
and the time of the response, which differ each time, are replaced.
"""

import re
from pathlib import Path

from nanoserve import LLM
from nanoserve.serve.http.chat_completions import ChatAnswer, chat_requests
from nanoserve.serve.http.protocol import ChatBody

FILE = Path(__file__).with_name("stream.txt")
BODY = {
    "messages": [{"role": "user", "content": "What is a KV cache?"}],
    "max_tokens": 6,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def recorded() -> str:
    """The events of one response, step by step."""
    with LLM("tiny-qwen3") as llm:
        engine, body = llm.engine, ChatBody(**BODY)
        (request,) = requests = chat_requests(body, engine, lambda: "one")
        answer = ChatAnswer(body, "tiny-qwen3", requests, engine.tokenizer)
        engine.add(request)
        events = b""
        while engine.has_unfinished_requests():
            events += answer.events(engine.step())
        events += answer.last_events()
    text = re.sub(r"chatcmpl-[0-9a-f]{32}", "chatcmpl-1", events.decode())
    return re.sub(r'"created": \d+', '"created": 0', text)


if __name__ == "__main__":
    FILE.write_text(recorded(), encoding="utf-8")
