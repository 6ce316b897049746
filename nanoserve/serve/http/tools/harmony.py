"""A parser for harmony, the format of gpt-oss: an output is a sequence of messages in channels.

    <|channel|>analysis<|message|>Weather, so I call it.<|end|><|start|>assistant<|channel|>
    commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

(It is one line.) The prompt ends with `<|start|>assistant`. A message has a header, with a channel
and maybe a recipient, and a body. The channel "analysis" is the reasoning. The recipient
`functions.x` makes a message a call of x. Other messages in the channels "final" and "commentary"
are content. A message to another recipient, such as a built-in tool, and one of another role than
the assistant are not for the user: they are reasoning.
"""

import re
from typing import NamedTuple

from nanoserve.serve.http.tools.parse_result import Parsed, ToolCall, without_beginning_of

NAME = "openai_gptoss"  # of the reasoning parser, in vLLM, too
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
SPECIAL_TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
STOPS = (CALL, RETURN)  # the output ends with either
ROLE = "assistant"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
# A body ends with these. Models leave out the first: what begins a message ends the one before.
_ENDS = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START, CHANNEL))))
_END_OF_OUTPUT = re.compile(f"({re.escape(RETURN)}|{re.escape(END)})$")
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


class _Message(NamedTuple):
    header: str
    body: str
    is_complete: bool


def parse(
    text: str,
    is_final: bool,
    has_tools: bool = True,
    begun: str = "",
    is_final_last: bool = False,
) -> Parsed:
    """Return the reasoning, the content and the calls of an output that follows the prompt.

    has_tools: without, the body of a call is content. begun: see `begun_in`. is_final_last: True if
    no message follows one in the channel "final", whose body may then contain any tag. The bodies
    of several messages are joined by line feeds.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    for message in _messages(begun + text, is_final, is_final_last):
        channel, recipient = _CHANNEL.search(message.header), _RECIPIENT.search(message.header)
        to = "" if recipient is None else recipient[1]
        name = to.removeprefix(_FUNCTIONS) if to.startswith(_FUNCTIONS) else ""
        is_answer = message.header.startswith((ROLE, CHANNEL)) or not message.header
        if name and has_tools:
            arguments = message.body.strip()
            if message.is_complete or arguments:
                calls.append(ToolCall(name, arguments or "{}", message.is_complete))
        elif (channel is not None and channel[1] == "analysis") or (to and not name):
            reasoning.append(message.body)
        else:
            (content if is_answer or name else reasoning).append(message.body)
    joined = ["\n".join(filter(None, bodies)) for bodies in (reasoning, content)]
    return Parsed(joined[0], joined[1], calls)


def content_and_calls(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """Return (content, calls), like the parsers of other formats; reasoning is left out."""
    parsed = parse(text, is_final)
    return parsed.content, parsed.calls


def begun_in(prompt: str | None) -> str:
    """Return what a prompt has of the message that the output continues, without its body.

    It is "" unless the prompt goes on after `<|start|>assistant`.
    """
    _, start, last = (prompt or "").rpartition(START)
    header, message, _ = last.partition(MESSAGE)
    return header.removeprefix(ROLE) + message if start else ""


def _messages(text: str, is_final: bool, is_final_last: bool) -> list[_Message]:
    """Split an output into its messages; the header of the first has no role.

    The last one may be incomplete; it is left out while its header is. Text where a header should
    be is a message of its own, without one.
    """
    messages, at = [], 0
    while at < len(text):
        header = ""
        rest = text[at : at + 2 * len(CHANNEL)].lstrip()
        if at == 0 or text.startswith((START, CHANNEL), at):
            is_header = rest.startswith((START, CHANNEL, "to="))
            if not is_header and not is_final and _begins(rest):
                break
            end = text.find(MESSAGE, at) if is_header else -1
            if is_header and end < 0 and (not is_final or _SPECIAL.search(text, at)):
                break  # a header that breaks off says nothing
            if end >= 0:
                header, at = text[at:end].removeprefix(START).lstrip(), end + len(MESSAGE)
        found = _ENDS.search(text, at)
        channel = _CHANNEL.search(header)
        if is_final_last and channel is not None and channel[1] == "final":
            found = _END_OF_OUTPUT.search(text, at)
        body = text[at:] if found is None else text[at : found.start()]
        if at > 0 and not header:
            body = body.lstrip()
        is_complete = found is not None or is_final
        if not is_complete:
            body = without_beginning_of(body, SPECIAL_TOKENS)
        messages.append(_Message(header, body, is_complete))
        if found is None:
            break
        at = found.start() if found[0] in (START, CHANNEL) else found.end()
    return messages


def _begins(text: str) -> bool:
    """Return True if `text` may become a header."""
    return any(start.startswith(text) for start in (START, CHANNEL, "to="))
