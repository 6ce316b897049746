"""Calls as models write them in formats with tags, sections and keywords, and what they say."""

import json
from typing import Any

from nanoserve.serve.http.tools.parse_result import ToolCall
from nanoserve.serve.http.tools.parsers import ToolFormat

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "now": {"type": "boolean"},
            "tags": {"type": "array"},
            "more": {"$ref": "#/$defs/More"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["integer", "string"]},
            "level": {"enum": [1, 2]},
            "free": {},
        },
        "$defs": {"More": {"type": "object"}},
    },
    "now": {},
}
# Types of the members in the arguments of test_tool_parsers.py.
TYPED: dict[str, Any] = {
    "properties": {
        "days": {"type": "array"},
        "n": {"type": "object"},
        "b": {"type": "number"},
    }
}


def call(arguments: str = '{"city": "Paris"}', name: str = "get_weather") -> ToolCall:
    return ToolCall(name, arguments, True)


def cut_off(arguments: str) -> ToolCall:
    return ToolCall("get_weather", arguments, False)


def qwen(**arguments: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"


def glm(**arguments: str) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
    )
    return f"<tool_call>get_weather\n{pairs}</tool_call>"


Case = tuple[str, str, list[ToolCall]]
PARIS, TIME = qwen(city="Paris"), call("{}", "now")
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
QWEN: list[Case] = [
    ("Just <tool_call text.", "Just <tool_call text.", []),
    (PARIS, "", [call()]),
    (f"I look.\n\n{PARIS}\n{NOW} done", "I look.\ndone", [call(), TIME]),
    (qwen(city='\u5317\n\n\t\\ " {'), "", [call('{"city": "\u5317\\n\\n\\t\\\\ \\" {"}')]),
    (qwen(city="", days="7", share="-1e3"), "", [call('{"city": "", "days": 7, "share": -1e3}')]),
    (qwen(days="seven", share="nan"), "", [call('{"days": "seven", "share": "nan"}')]),
    (
        qwen(now="True", tags='["a", {"b": 1}]'),
        "",
        [call('{"now": true, "tags": ["a", {"b": 1}]}')],
    ),
    (qwen(more="{'a': None, 'b': [True]}"), "", [call('{"more": {"a": null, "b": [true]}}')]),
    (qwen(note="null", city="null"), "", [call('{"note": null, "city": "null"}')]),
    (qwen(note="nullable", either="5"), "", [call('{"note": "nullable", "either": 5}')]),
    (qwen(either="5 or 6", level="2"), "", [call('{"either": "5 or 6", "level": 2}')]),
    (qwen(free="5", unknown="[1]"), "", [call('{"free": "5", "unknown": "[1]"}')]),
    (qwen(city="a < b </param <tool_call>"), "", [call('{"city": "a < b </param <tool_call>"}')]),
    (PARIS.removeprefix("<tool_call>\n"), "", [call()]),  # the outer tag was left out
    (PARIS.removesuffix("\n</tool_call>") + " b", "b", [call()]),
    (PARIS.replace("</function>\n", ""), "", [call()]),
    (PARIS.replace("\n</parameter>", ""), "", [call()]),
    (PARIS[: PARIS.index("</function>")], "", [call()]),
    (PARIS[: PARIS.index("ris")], "", [cut_off('{"city": "Pa')]),
    (qwen(days="12")[:-45], "", [cut_off("{")]),
    ("<tool_call>\n<function=get_wea", "<tool_call>\n<function=get_wea", []),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("Use <function=x> for x.", "Use <function=x> for x.", []),
    (PARIS.replace("<par", "oops <par"), "oops " + PARIS[PARIS.index("<par") :], [cut_off("{")]),
]
GLM: list[Case] = [
    ("Just <tool_call text.", "Just <tool_call text.", []),
    (glm(city="Paris"), "", [call()]),
    (f"I look.\n{glm(city='Paris')}\n<tool_call>now\n</tool_call>", "I look.", [call(), TIME]),
    (glm(city=" \u5317\u4eac\n", days="7"), "", [call('{"city": " \u5317\u4eac\\n", "days": 7}')]),
    (glm(tags='["</arg_key>"]', now="false"), "", [call('{"tags": ["</arg_key>"], "now": false}')]),
    (glm(city="Paris").replace("\n", ""), "", [call()]),
    (f"{glm(city='Paris')}<tool_call>now</tool_call>", "", [call(), TIME]),
    ("<tool_call>now", "<tool_call>now", []),
    (glm(city="Paris")[:50], "", [cut_off("{")]),
    (glm(city="Paris")[:60], "", [cut_off('{"city": "Pa')]),
    (glm(city="Paris").replace("</tool_call>", ""), "", [call()]),
    ("<tool_call>no name</tool_call>", "<tool_call>no name</tool_call>", []),
    (
        glm(city="Paris").replace("<arg_value>", "<value>"),
        "<arg_key>city</arg_key>\n<value>Paris</arg_value>\n</tool_call>",
        [cut_off("{")],
    ),
]
INVOKED = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
MINIMAX: list[Case] = [
    (f"<minimax:tool_call>\n{INVOKED}</minimax:tool_call>", "", [call()]),
    (
        f'a <minimax:tool_call>\n{INVOKED}<invoke name="now">\n</invoke>\n</minimax:tool_call> b',
        "a\nb",
        [call(), TIME],
    ),
    (f"<minimax:tool_call>{INVOKED}", "", [call()]),
    ("<minimax:tool_call> <invoke>", "<minimax:tool_call> <invoke>", []),
]
SEED: list[Case] = [
    (PARIS.replace("tool_call", "seed:tool_call").replace("\n", ""), "", [call()]),
    ("<seed:tool_call><function=x y>", "<seed:tool_call><function=x y>", []),
]


def deepseek(*calls: str) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


V31_PARIS = 'get_weather<｜tool▁sep｜>{"city": "Paris"}'
V3_PARIS = 'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```'
V3_NOW = "function<｜tool▁sep｜>now\n```json\n{}\n```"
TWO = deepseek(V3_PARIS, V3_NOW).replace("end｜><｜tool▁call▁", "end｜>\n<｜tool▁call▁")
DEEPSEEK_V31: list[Case] = [
    ("Just <｜tool text.", "Just <｜tool text.", []),
    (deepseek(V31_PARIS), "", [call()]),
    (f"I look.\n{deepseek(V31_PARIS, 'now<｜tool▁sep｜>{}')} b", "I look.\nb", [call(), TIME]),
    (deepseek("now<｜tool▁sep｜>"), "", [TIME]),
    (deepseek(V31_PARIS)[:67], "", [cut_off('{"cit')]),
    (deepseek(V31_PARIS)[:60], deepseek(V31_PARIS)[:60], []),
    (deepseek('get_weather<｜tool▁sep｜>{"a": oops}')[:-35], "oops}", [cut_off('{"a": ')]),
    (deepseek("nothing"), deepseek("nothing"), []),
    (deepseek("a<｜tool▁sep｜>[1]"), deepseek("a<｜tool▁sep｜>[1]"), []),
]
DEEPSEEK_V3: list[Case] = [
    (deepseek(V3_PARIS), "", [call()]),
    (TWO, "", [call(), TIME]),
    (deepseek(V3_PARIS).replace("\n```<", "<"), "", [call()]),
    (deepseek(V31_PARIS), deepseek(V31_PARIS), []),
]


def kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>{one}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for one, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


KIMI: list[Case] = [
    ("Just <|tool text.", "Just <|tool text.", []),
    (
        "a" + kimi(("functions.get_weather:0", '{"city": "Paris"}'), ("functions.now:1", "{}")),
        "a",
        [call()._replace(id="functions.get_weather:0"), TIME._replace(id="functions.now:1")],
    ),
    (kimi(("now", "{}")), "", [TIME]),
    (kimi(("now:x y", "{}")), kimi(("now:x y", "{}")), []),
]
GRANITE: list[Case] = [
    ("Just <|tool_ text.", "Just <|tool_ text.", []),
    ('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [call()]),
    (
        'a <tool_call> [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now"}]',
        "a",
        [call(), TIME],
    ),
    ("<|tool_call|> none", "<|tool_call|> none", []),
    ("<|tool_call|>[]", "<|tool_call|>[]", []),
    ('<|tool_call|>[{"name": "get_weather", "arguments": {"city', "", [cut_off('{"city')]),
]
PYTHONIC: list[Case] = [
    ("Just text.", "Just text.", []),
    ("[1, 2]", "[1, 2]", []),
    ("[a link](now()) [b]", "[a link](now()) [b]", []),
    ('[get_weather(city="Paris")]', "", [call()]),
    (" [get_weather(city='Paris'), now()]\n", "", [call(), TIME]),
    ('<|python_start|>[get_weather(city = "Paris",),]<|python_end|>', "", [call()]),
    ("<|python_start|>[now()]<|python_end|> b", "b", [TIME]),
    ("<|python_st", "<|python_st", []),
    (
        "[get_weather(city='\u5317\\'\\n\\u4eac', more={'a': [1, (2.50,), None], 3: true})]",
        "",
        [call('{"city": "\u5317\'\\n\u4eac", "more": {"a": [1, [2.5], null], "3": true}}')],
    ),
    ("[get_weather(days=-1_000, share=.5)]", "", [call('{"days": -1000, "share": 0.5}')]),
    ('[get_weather(city=\'\', note="""a\'b""")]', "", [call('{"city": "", "note": "a\'b"}')]),
    ("[now(), get_weather(5)]", "get_weather(5)]", [TIME]),
    ("[now(5)]", "[now(5)]", []),
    ("[get_weather(city=='a')]", "[get_weather(city=='a')]", []),
    ("[get_weather(city='Par", "", [cut_off("{")]),
    ("[get_weather(days=1, city=oops)] b", "oops)] b", [cut_off('{"days": 1')]),
    ("[get_wea", "[get_wea", []),
    ("[now()] and more", "and more", [TIME]),
]
CASES_WITH_TAGS: dict[str, list[Case]] = {
    "qwen3_coder": QWEN,
    "seed_oss": SEED,
    "glm45": GLM,
    "minimax_m2": MINIMAX,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI,
    "granite": GRANITE,
    "pythonic": PYTHONIC,
}
# What chat templates show of a format, shortened.
SHOWN = {
    "qwen3_coder": "<tool_call>\n<function=name>\n<parameter=a>\nvalue\n</parameter>\n</function>",
    "seed_oss": "<seed:tool_call>\n<function=name>\n<parameter=a>value</parameter>\n</function>",
    "glm45": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
    "glm47": "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="x">\n<parameter name="y">z</parameter>',
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '\\n```json\\n'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "granite": "'<|tool_call|>' + calls",
    "pythonic": "<|start_header_id|> [func_name1(params_name1=params_value1), func_name2(params)]",
}


def written_as(form: ToolFormat, arguments: str) -> str:
    """Arguments, given as JSON, in the form that a model writes them."""
    if form.arguments is None:
        return arguments
    members = json.loads(arguments)
    if form.name == "pythonic":
        return ", ".join(f"{key}={value!r}" for key, value in members.items())
    begin, end = form.arguments.begin, form.arguments.close + form.arguments.behind
    return "".join(
        begin % key + (value if isinstance(value, str) else json.dumps(value)) + end
        for key, value in members.items()
    )
