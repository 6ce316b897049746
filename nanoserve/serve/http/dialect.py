"""The seam between the APIs of one server.

`ChatBody` is the internal form of a conversation: messages as chat templates take them, tools, a
constraint, sampling parameters. /v1/chat/completions reads it from a request as it is. Another API
reads its own body, translates it with `BodyReader.checked`, and writes its own answer from the
blocks of the output (`nanoserve.serve.http.tools.blocks`). So whatever chat completions can do, the
others can.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from fastapi import Request, Response

from nanoserve.compat.request_names import FOREIGN, Foreign
from nanoserve.serve.http.body_reader import BodyReader
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import Body, ChatBody
from nanoserve.serve.http.response_writer import AnswerWriter
from nanoserve.serve.http.templates import Templates
from nanoserve.serve.http.token_endpoints import TokenEndpoints
from nanoserve.utils.parameter_table import PARAMETERS

# Called with (tools that may be called, reasoning parser, body, model, requests, tokenizer).
AnswerKind = Callable[..., AnswerWriter]

# vLLM's fields of chat completions that other APIs accept as they are.
_ALIKE = (
    *("logit_bias", "structured_outputs", "priority", "cache_salt", "chat_template_kwargs"),
    *("documents", "allow_special_tokens", "thinking_token_budget", "chat_template"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_whitespace_pattern", "request_id"),
)
_NOT_ALIKE = ("n", "prompt_logprobs", "max_tokens")
_ADVICE = {
    "use prompt_logprobs": "use /v1/completions",
    "use return_token_ids": "use /v1/chat/completions",
}
_ONE_ANSWER = Foreign("an answer of this API is one: send several requests", (1,))


class ChatServer(Protocol):
    """The part of `ApiServer` that the endpoints of other APIs need."""

    bodies: BodyReader
    templates: Templates
    tokens: TokenEndpoints

    async def answer_chat(
        self, request: Request, body: ChatBody, answer_kind: AnswerKind
    ) -> Response: ...

    def abort(self, request_id: str) -> None: ...


class DialectBody(Body):
    """The base of the request bodies of other APIs."""

    same: ClassVar[frozenset[str]] = frozenset(
        {name for name, parameter in PARAMETERS.items() if parameter.is_http} | {*_ALIKE}
    ) - {*_NOT_ALIKE}

    @classmethod
    def passed_on(cls) -> frozenset[str]:
        """Return the names of fields that go to `ChatBody` as they are."""
        return cls.same & ChatBody.model_fields.keys() - cls.model_fields.keys()

    def extra_fields(self) -> dict[str, Any]:
        """Return vLLM's fields of this request, for `ChatBody`."""
        given, names = self.model_extra or {}, self.passed_on()
        return {name: value for name, value in given.items() if name in names}


def foreign_names(own: Mapping[str, Foreign], advice: dict[str, str]) -> dict[str, Foreign]:
    """Return the names that an API refuses: `own`, and what chat completions refuse.

    advice: this API's advice by the beginning of that of chat completions.
    """
    table = {"n": _ONE_ANSWER, "prompt_logprobs": Foreign("use /v1/completions"), **FOREIGN}
    for name, one in table.items():
        found = [
            ours
            for begin, ours in (_ADVICE | advice).items()
            if re.match(rf"{begin}(?!\w)", one.instead)
        ]
        if one.ours == "n":
            table[name] = _ONE_ANSWER
        elif found:
            table[name] = Foreign(found[0], one.neutral)
    return {**table, **own}


def add_text(messages: list[dict[str, Any]], role: str, text: str) -> None:
    """Add a message of a user or of the system, or its text to the last message of this role.

    Adjacent messages of one role are one message, because many chat templates want roles to
    alternate.
    """
    if messages and messages[-1]["role"] == role:
        last = messages[-1]
        last["content"] = "\n".join(filter(None, [last["content"], text]))
    else:
        messages.append({"role": role, "content": text})


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields of an API instead of those of `ChatBody`.

    names: replacements by regular expressions, which match the beginning of a message.
    """
    try:
        yield
    except ApiError as error:
        raise _renamed(error, names) from None


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    message, param = str(error), error.param
    for pattern, name in names.items():
        message, number = re.subn(rf"^{pattern}(?!\w)", name, message, count=1)
        if number:
            break
    if param is not None:
        found = (re.subn(rf"^{pattern}(?!\w)", name, param) for pattern, name in names.items())
        param = next((new for new, number in found if number), param)
    return ApiError(error.status, message, param, error.code, error.headers)
