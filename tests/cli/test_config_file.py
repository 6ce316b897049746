"""`--config FILE`: each entry of the file is a flag, and the command line replaces entries."""

from pathlib import Path
from typing import Any

import pytest

from nanoserve.cli.engine_flags import engine_options
from nanoserve.cli.parser import model_of
from nanoserve.cli.serve import _OURS, parse_args

MODEL = "tiny-qwen3"


def parsed(tmp_path: Path, content: str, *arguments: str) -> Any:
    file = tmp_path / "serve.yaml"
    file.write_text(content, encoding="utf-8")
    return parse_args([*arguments, "--config", str(file)])


@pytest.mark.parametrize("place", [(MODEL, "--config"), ("--config", MODEL)])
@pytest.mark.parametrize("name", ["served-model-name", "middleware", "allowed_origins", "api-key"])
def test_a_list_takes_no_word_behind_it(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"{name}: [a, b]\n")
    args = parse_args([str(file) if word == "" else word for word in _with_file(place)])
    assert args.model == MODEL
    assert getattr(args, name.replace("-", "_")) == ["a", "b"]


def _with_file(place: tuple[str, str]) -> list[str]:
    """The words of a command line, with "" for the path of the file."""
    return [word for part in place for word in ([part, ""] if part == "--config" else [part])]


def test_the_command_line_replaces_what_the_file_has(tmp_path: Path) -> None:
    content = "port: 1\nmiddleware: [a:b]\ntensor-parallel-size: 4\nenable-prefix-caching: false\n"
    given = ["--port", "2", "--middleware", "c:d", "-tp", "2", "--enable-prefix-caching"]
    args = parsed(tmp_path, content, *given)
    assert (args.port, args.middleware) == (2, ["c:d"])
    assert engine_options(args, _OURS) == {"tensor_parallel_size": 2, "enable_prefix_caching": True}
    args = parsed(tmp_path, f"model: {MODEL}\n", "other")
    with pytest.raises(ValueError, match="got two models"):
        model_of(args)


def test_nothing_is_the_default(tmp_path: Path) -> None:
    args = parsed(tmp_path, "port:\nserved-model-name: []\naccess-log: false\nuds: null\n")
    assert args.port == 8000 and args.uds is None and not args.access_log
    assert "served_model_name" not in args
    assert parsed(tmp_path, "").port == 8000


def test_objects_and_their_entries(tmp_path: Path) -> None:
    content = (
        "default-chat-template-kwargs: {enable_thinking: false}\n"
        "speculative-config.method: ngram\nspeculative-config.enforce_eager: true\n"
    )
    args = parsed(tmp_path, content)
    assert args.default_chat_template_kwargs == {"enable_thinking": False}
    assert engine_options(args, _OURS) == {
        "speculative_config": {"method": "ngram", "enforce_eager": True}
    }


@pytest.mark.parametrize("value", ["5", "null", "[]", "false", "{a: 1}"])
def test_an_unknown_entry_is_told_whatever_its_value_is(
    value: str, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        parsed(tmp_path, f"max-modle-len: {value}\n")
    error = capsys.readouterr().err
    assert "unrecognized argument --max-modle-len: did you mean --max-model-len?" in error


@pytest.mark.parametrize("name", ["host", "root-path", "api-key", "max-num-seqs", "trace"])
def test_a_boolean_is_no_value(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"serve\.yaml: {name}: true is not a value .* quotes"):
        parsed(tmp_path, f"{name}: on\n", "a-model")


def test_there_is_one_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="given twice"):
        parsed(tmp_path, "port: 1\n", "--config", "other.yaml")
