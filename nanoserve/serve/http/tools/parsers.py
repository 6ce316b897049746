"""Chooses the formats of calls and of reasoning, from options or from a chat template."""

from nanoserve.serve.http.tools import granite, harmony, llama3_json, mistral, sections, tagged
from nanoserve.serve.http.tools.formats import FORMATS as FORMATS
from nanoserve.serve.http.tools.formats import MISTRAL_BY_NAME
from nanoserve.serve.http.tools.formats import ToolFormat as ToolFormat
from nanoserve.utils.checks import require

# Texts in a template that all have to be there for a format, the more specific ones first. None is
# a format for which there is no parser.
_SIGNS: list[tuple[tuple[str, ...], str | None]] = [
    ((harmony.CHANNEL,), "openai"),
    ((sections.DEEPSEEK_V3.open, "```json"), "deepseek_v3"),
    ((sections.DEEPSEEK_V31.open,), "deepseek_v31"),
    ((sections.KIMI_K2.open,), "kimi_k2"),
    ((tagged.MINIMAX_M2.open, tagged.MINIMAX_M2.name_open), "minimax_m2"),
    ((tagged.SEED_OSS.open, tagged.SEED_OSS.key_open), "seed_oss"),
    ((tagged.QWEN3_CODER.open, "<function=", tagged.QWEN3_CODER.key_open), "qwen3_coder"),
    (("<function=",), None),
    ((f"{tagged.GLM.key_close}{tagged.GLM.value_open}",), "glm47"),
    ((tagged.GLM.key_open, tagged.GLM.value_open), "glm45"),
    (("<arg_key>",), None),
    ((granite.TAG,), "granite"),
    (("<tool_call>",), "hermes"),
    (("func_name1(",), "pythonic"),
]


def detect(chat_template: str | None) -> ToolFormat | None:
    """Return the format of calls that a chat template shows to its model; None if unknown."""
    template = chat_template or ""
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return None if name is None else FORMATS[name]
    if mistral.TAG in template:
        return MISTRAL_BY_NAME if mistral.ARGUMENTS in template else FORMATS["mistral"]
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return FORMATS["llama3_json"] if is_llama or llama3_json.TAG in template else None


def formats_of(
    tool_call_parser: str | None, reasoning_parser: str | None, chat_template: str | None
) -> tuple[ToolFormat | None, str | None]:
    """Return the format of calls, None if unknown, and the name of the reasoning parser, or None.

    What is not given follows from the template, or from the other: in harmony, both are one format.
    """
    if tool_call_parser is not None:
        form: ToolFormat | None = FORMATS[tool_call_parser]
    elif reasoning_parser == harmony.NAME:
        form = FORMATS["openai"]
    else:
        form = detect(chat_template)
    implied = None if form is None else form.reasoning_parser
    if implied is not None and reasoning_parser not in (None, implied):
        form, implied = None, None  # the template's format is not that of the reasoning
    return form, reasoning_parser or implied


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise `ValueError` for two parsers that contradict each other: see `formats_of`."""
    if tool_call_parser is None or reasoning_parser is None:
        return
    implied = FORMATS[tool_call_parser].reasoning_parser
    require(
        reasoning_parser == implied or (implied is None and reasoning_parser != harmony.NAME),
        f"tool_call_parser={tool_call_parser!r} and reasoning_parser={reasoning_parser!r} "
        f"contradict each other: 'openai' and {harmony.NAME!r} belong together; omit one of them",
    )
