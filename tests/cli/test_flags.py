"""Flags of the commands: exact names, vLLM's notations, advice for what others call otherwise."""

import json
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import fields
from importlib import import_module

import pytest

from nanoserve.cli.engine_args import EngineArgs, FlexibleArgumentParser
from nanoserve.cli.engine_flags import engine_options, option_help
from nanoserve.cli.main import main
from nanoserve.cli.parser import Parser, whole_number
from nanoserve.cli.serve import _OURS, parse_args
from nanoserve.compat.options import engine_config
from nanoserve.compat.server_flags import ELSEWHERE, FLAGS
from nanoserve.config import EngineConfig
from nanoserve.serve.http.settings import ServerSettings

# Each as somebody starts vLLM with it, and a word of what is said; None: it is accepted.
VLLM = [
    ("--lora-modules a=b c=d", None),
    ("--response-role assistant", None),
    ("--response-role ai", "assistant"),
    ("--uvicorn-log-level debug", None),
    ("--disable-uvicorn-access-log", None),
    ("--disable-access-log-for-endpoints /health,/metrics", None),
    ("--api-server-count 1", None),
    ("-asc 4", "--data-parallel-size"),
    ("--enable-request-id-headers", None),
    ("--no-enable-request-id-headers", None),
    ("--ssl-cert-reqs 0", None),
    ('--allowed-methods ["*"] --allowed-headers ["*"]', None),
    ("--max-log-len 100", None),
    ("--headless", "--data-parallel-size"),
    ("--tool-parser-plugin p.py", "--tool-call-parser"),
    ("--fingerprint-mode none", None),
    ("--sse-keep-alive-interval 15", "--heartbeat-interval"),
    ("--grpc", "HTTP"),
    ("--disable-fastapi-docs", None),
]
NO_MODEL = ("no-such-folder",)


def options(*arguments: str) -> dict[str, object]:
    return engine_options(parse_args(list(arguments)), _OURS)


@pytest.mark.parametrize(("given", "told"), VLLM, ids=[given for given, _ in VLLM])
def test_flags_of_vllms_server_are_known(given: str, told: str | None) -> None:
    if told is None:
        assert options(*given.split()) == {}
    else:
        with pytest.raises(ValueError, match=f"^--.*not (implemented|supported) here.*{told}"):
            parse_args(given.split())


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_each_is_refused_with_its_advice_unless_it_asks_for_nothing(name: str) -> None:
    accepts, instead = FLAGS[name]
    flag, refused = f"--{name.replace('_', '-')}", '{"asks": "for something"}'
    try:
        parse_args([flag])
    except SystemExit:  # it takes a value
        if accepts(json.loads(refused)):
            parse_args([f"{flag}={refused}"])
            return
        with pytest.raises(ValueError) as caught:
            parse_args([f"{flag}={refused}"])
    except ValueError as error:
        assert not accepts(True) and instead in str(error)
        return
    else:
        assert accepts(True)
        return
    assert str(caught.value).startswith(flag) and instead in str(caught.value)


@pytest.mark.parametrize("command", ["serve", "batch", "chat", "info", "bench", "trace"])
def test_no_command_takes_the_beginning_of_a_flag(command: str, capsys) -> None:
    flags = {"trace": "--chrom", "bench": "--max-num-seq"}
    flag = flags.get(command, "--max-num-seq")
    with pytest.raises(SystemExit) as ended:
        main([command, "x", flag, "3"] if command != "bench" else [command, flag, "3"])
    assert ended.value.code == 2
    sys.modules.pop("nanoserve.cli.trace", None)  # or runpy warns where it is run again
    error = capsys.readouterr().err
    assert f"unrecognized argument {flag}: did you mean {flag}" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("-c 4096", "--max-model-len"),
        ("-c4096", "--max-model-len"),
        ("-ngl 99", "--device cuda"),
        ("-t 8", "--num-threads"),  # not the beginning of -tp
        ("--jinja", "remove it"),
        ("--alias x", "--served-model-name"),
        ("--parallel 4", "--max-num-seqs"),
        ("--temprature 0", "with each request"),
        ("--tool-call-parse hermes", "--tool-call-parser"),
    ],
)
def test_what_others_call_otherwise_is_told(given: str, told: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse_args(given.split())
    error = capsys.readouterr().err
    assert f"unrecognized argument {given.split()[0]}" in error and told in error


def test_advice_for_other_servers_flags_hides_none_of_ours() -> None:
    parser = import_module("nanoserve.cli.serve")._parser()
    assert not ELSEWHERE.keys() & parser._option_string_actions.keys()


class Built(Exception):
    """Raised in the place of parsing, with the parser of a command."""


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    """Return the parser with which a command reads its arguments."""

    def stop(parser: Parser, *_: object) -> None:
        raise Built(parser)

    monkeypatch.setattr(Parser, "parse_known_args", stop)
    with pytest.raises(Built) as caught:
        main(command.split())
    sys.modules.pop("nanoserve.cli.trace", None)  # or runpy warns where it is run again
    return caught.value.args[0]


@pytest.mark.parametrize(
    "command", ["serve", "batch", "chat", "info", "bench", "bench --url http://x", "trace"]
)
def test_every_flag_has_a_sentence_of_help_with_its_default(command: str, monkeypatch) -> None:
    parser = parser_of(command, monkeypatch)
    shown = [action for action in parser._actions if action.help != SUPPRESS]
    assert len(shown) > 3
    for action in shown:
        if action.dest == "help":  # argparse's own
            continue
        name = "/".join(action.option_strings) or action.dest
        text = parser._get_formatter()._expand_help(action)
        assert len(text.split()) > 2 and text[0].isupper() and text.endswith("."), (name, text)
        assert "`" not in text or "--help`" in text, (name, text)
        if action.default not in (None, SUPPRESS, False, [], [None]):
            assert f"Default: {action.default}." in text.replace("600.", "600.0."), (name, text)
    for group in parser._action_groups:
        if group.description:
            assert group.description.endswith("."), group.description


def test_help_of_an_engines_option_is_the_comment_above_its_field() -> None:
    texts = option_help()
    names = {field.name for field in fields(EngineConfig)} - {"model", "logits_processors"}
    assert texts.keys() == names
    for field in fields(EngineConfig):
        if field.name in names:
            text = texts[field.name]
            default = "" if field.default is None else f"{field.default}."
            assert text[0].isupper() and text.endswith(".") and "`" not in text, text
            assert text.count("Default: ") == 1 and f"Default: {default}" in text, text
    assert texts["block_size"] == "Number of tokens in a KV block. Default: 16."
    assert "or --max-num-seqs if that is more" in texts["max_num_batched_tokens"]


INTEGERS = {
    **{"4096": 4096, "1k": 1000, "1K": 1024, "32k": 32000, "2.5k": 2500, "25.6k": 25600},
    **{"4.1k": 4100, "4M": 4 * 2**20, "2M": 2 * 2**20, "4m": 4_000_000, "1.5m": 1_500_000},
    **{"1G": 2**30, "1g": 10**9, "2T": 2 * 2**40, "0.5t": 5 * 10**11, " 2K ": 2048},
}


@pytest.mark.parametrize(("text", "number"), INTEGERS.items())
def test_integers_have_units_as_vllm_reads_them(text: str, number: int) -> None:
    assert whole_number(text) == number
    assert options("--max-model-len", text) == {"max_model_len": number}
    given = ["--max-num-batched-tokens", text, "--kv-cache-memory-bytes", text]
    assert options(*given) == {"max_num_batched_tokens": number, "kv_cache_memory_bytes": number}


@pytest.mark.parametrize("text", ["2.5K", "k", "1kk", "1e3k", "", "infk", "1,000", "1.5", "4KiB"])
def test_what_is_no_integer_is_told(text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        options("--max-model-len", text)
    error = capsys.readouterr().err
    assert f"argument --max-model-len: {text!r} must be an integer" in error
    assert "4.5k (4500) or 4K (4096)" in error
    assert ("K takes no decimal fraction; did you mean 2.5k?" in error) == (text == "2.5K")


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--block-size", "--num-kv-blocks"])
def test_integers_of_other_flags_have_no_units(flag: str, capsys) -> None:
    with pytest.raises(SystemExit):
        options(flag, "1k")
    assert f"argument {flag}: invalid int value: '1k'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["auto", "-1", "AUTO"])
def test_a_length_may_be_automatic(text: str) -> None:
    assert options("--max-model-len", text) == {"max_model_len": None}
    assert engine_config("m", {"max_model_len": -1}) == EngineConfig("m")
    assert engine_config("m", {"max_model_len": "auto"}) == EngineConfig("m")


def test_vllms_shorter_flags() -> None:
    given = ["-tp", "2", "-pp=3", "-dp", "4", "-q", "int8", "-O3"]
    given += ["--device-memory-utilization", "0.5"]
    args = parse_args(given)
    assert args.data_parallel_size == 4
    assert engine_options(args, _OURS) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "quantization": "int8",
        "optimization_level": 3,
        "device_memory_utilization": 0.5,
    }


def test_entries_of_an_object_may_be_flags() -> None:
    given = [
        "--speculative_config.method",
        "ngram",
        "--speculative-config.num_speculative_tokens=3",
    ]
    given += ["--structured-outputs-config.backend=xgrammar"]
    assert options(*given) == {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "structured_outputs_config": {"backend": "xgrammar"},
    }


@pytest.mark.parametrize("flag", ["--allowed-origins", "--served-model-name", "--api-key"])
def test_a_list_may_be_words_or_json(flag: str) -> None:
    name = flag[2:].replace("-", "_")
    for given in (["a", "b"], ['["a", "b"]'], [' ["a","b"]']):
        assert getattr(parse_args([flag, *given]), name) == ["a", "b"]
    assert getattr(parse_args([flag, '["*"]']), name) == ["*"]


@pytest.mark.parametrize("given", ['["*"', "[1]", '[["a"]]'])
def test_a_list_that_is_none_of_texts_is_refused(given: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--allowed-origins", given])
    assert "--allowed-origins" in capsys.readouterr().err


@pytest.mark.parametrize("origin", ['["*"]', "example.org", "https://example.org/", "a, b", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins"):
        ServerSettings(allowed_origins=[origin])
    ServerSettings(allowed_origins=["*", "https://example.org:8443", "chrome-extension://abc"])


def test_a_chat_template_is_a_file_or_its_text(tmp_path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert options("--chat-template", str(file)) == {"chat_template": file.read_text()}


@pytest.mark.parametrize("command", ["serve", "chat", "info"])
def test_a_chat_template_is_read_before_anything_starts(command: str, capsys) -> None:
    if command == "serve":
        pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
    assert main([command, "no-such-model", "--chat-template", "no.jinja"]) == 1
    assert "chat_template='no.jinja' is neither a file" in capsys.readouterr().err


def test_the_model_has_a_place_and_a_flag(capsys) -> None:
    def model(*given: str) -> Namespace:
        from nanoserve.cli.parser import model_of

        return model_of(parse_args(list(given)), "tiny-qwen3")

    assert model() == "tiny-qwen3" and model("m") == model("--model", "m") == "m"
    assert model("m", "--model=m") == "m"
    for command in ("serve", "info", "chat"):
        assert main([command, "a", "--model", "b"]) == 1
        assert "got two models" in capsys.readouterr().err


def test_flags_may_come_from_a_file(tmp_path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nport: 8123\nmax_model_len: 1k\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\nenable-auto-tool-choice: true\naccess-log: false\n"
        "speculative-config: {method: ngram}\nuvicorn-log-level: info\n"
    )
    args = parse_args(["--port", "9000", "--config", str(file), "--seed", "1"])
    assert (args.model_flag, args.port, args.served_model_name) == ("m", 9000, ["a", "b"])
    assert args.enable_auto_tool_choice and not args.access_log
    assert engine_options(args, _OURS) == {
        "max_model_len": 1000,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "ngram"},
        "seed": 1,
    }


@pytest.mark.parametrize("content", ["- a\n", "a: [\n", "config: x.yaml\n", "1: 2\n", None])
def test_a_file_of_flags_that_cannot_be_read_is_told(content: str | None, tmp_path) -> None:
    file = tmp_path / "serve.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"serve\.yaml"):
        parse_args([f"--config={file}"])
    with pytest.raises(ValueError, match="needs a YAML file"):
        parse_args(["--config"])


def test_a_flag_of_a_file_is_known_by_name_too(tmp_path, capsys) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-modle-len: 5\n")
    with pytest.raises(SystemExit):
        parse_args(["--config", str(file)])
    assert "did you mean --max-model-len?" in capsys.readouterr().err
    file.write_text("tool-parser-plugin: x.py\n")
    with pytest.raises(ValueError, match=r"--tool-parser-plugin 'x\.py'"):
        parse_args(["--config", str(file)])


def test_a_scripts_subcommands_have_flags_of_their_own(capsys) -> None:
    parser = FlexibleArgumentParser(prog="p")
    command = parser.add_subparsers().add_parser("run")
    EngineArgs.add_cli_args(command)
    args = parser.parse_args(["run", "-tp", "2", "--max_model_len", "1k", "-q", "int8"])
    assert (args.tensor_parallel_size, args.max_model_len) == (2, 1000)
    for unknown in ("-t", "--max-num-seq"):
        with pytest.raises(SystemExit):
            parser.parse_args(["run", unknown, "3"])
        assert "unrecognized argument" in capsys.readouterr().err


def test_words_behind_two_dashes_and_values_stay_as_they_are() -> None:
    parser = Parser(prog="p")
    parser.add_argument("--text")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args(["--text=a_b.c", "x_y", "--", "-t", "--a.b"])
    assert (args.text, args.words) == ("a_b.c", ["x_y", "-t", "--a.b"])
