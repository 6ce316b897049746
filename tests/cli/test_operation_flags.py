"""Flags of `nanoserve serve` for sockets, TLS, the log and middleware, checked before loading."""

import json
import logging
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanoserve.cli.main import main
from nanoserve.cli.operation_flags import WithoutPaths, read_log_config, uvicorn_options
from nanoserve.cli.serve import parse_args
from nanoserve.serve.http.settings import ServerSettings


def test_the_flags_of_the_settings_are_vllms(tmp_path: Path) -> None:
    given = "--root-path /llm --middleware a.b --middleware c:d e:f --enable-offline-docs"
    given += " --enable-server-load-tracking --enable-force-include-usage"
    given += ' --return-tokens-as-token-ids --allow-credentials --allowed-methods ["GET"]'
    args = parse_args([*given.split(), "--allowed-headers", "x-a", "x-b"])
    assert args.root_path == "/llm" and args.middleware == ["a.b", "c:d", "e:f"]
    assert args.allowed_methods == ["GET"] and args.allowed_headers == ["x-a", "x-b"]
    for name in (
        *("enable_offline_docs", "enable_server_load_tracking", "allow_credentials"),
        *("enable_force_include_usage", "return_tokens_as_token_ids"),
    ):
        assert getattr(args, name) is True and getattr(ServerSettings(), name) is False
        assert name not in parse_args([])
        with pytest.raises(ValueError, match=name):
            ServerSettings(**{name: "yes"})


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "/a//b", "/a?b", "/{x}", 5])
def test_a_root_path_is_a_path(path: Any) -> None:
    with pytest.raises(ValueError, match=r"root_path=.*must be a path such as '/llm'"):
        ServerSettings(root_path=path)
    assert ServerSettings(root_path="/a/b-c.d").root_path == "/a/b-c.d"
    for own in ("/v1", "/v1/chat", "/page"):  # and the others: see tests/serve/http/test_operations
        with pytest.raises(ValueError, match="one of the server's own paths"):
            ServerSettings(root_path=own)


def test_what_only_other_pages_need_is_refused_without_them() -> None:
    for name, value in (("allow_credentials", True), ("allowed_methods", ["GET"])):
        with pytest.raises(ValueError, match=rf"{name}=.* needs allowed_origins"):
            ServerSettings(**{name: value})
        ServerSettings(**{name: value}, allowed_origins=["*"])
    for name, value in (("allowed_methods", "get"), ("allowed_headers", "a b")):
        with pytest.raises(ValueError, match=rf"{name}='{value}' must be '\*', or like"):
            ServerSettings(**{name: ["*", value]}, allowed_origins=["*"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--uds x.sock --port 9", "instead of --host and --port"),
        ("--uds x.sock --host 0.0.0.0", "instead of --host and --port"),
        ("--uds= --access-log", "needs the path of a socket"),
        ("--access-log --disable-uvicorn-access-log", "exclude each other"),
        ("--access-log --uvicorn-log-level error", "--uvicorn-log-level error hides"),
    ],
)
def test_flags_that_contradict_each_other(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_args(given.split())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--middleware no_such_module:x", "No module named 'no_such_module'"),
        ("--middleware json:no_such_name", "no attribute 'no_such_name'"),
        ("--middleware json.dumps", "not function"),
        ("--middleware json", "'module:name'"),
        ("--middleware json:JSONDecoder", "is called with (app): too many positional"),
        ("--middleware asyncio.open_unix_connection", "is called with (request, call_next): "),
        ("--middleware a:b:c", "'module:name'"),
        ("--ssl-certfile c.pem", "--ssl-keyfile and --ssl-certfile"),
        ("--ssl-ca-certs c.pem", "--ssl-keyfile and --ssl-certfile"),
        ("--enable-ssl-refresh", "--ssl-keyfile and --ssl-certfile"),
        ("--ssl-keyfile no.pem --ssl-certfile no.pem", "cannot be used for TLS"),
        ("--ssl-keyfile k --ssl-certfile c --ssl-cert-reqs 2", "needs --ssl-ca-certs"),
        ("--log-config-file no.json", "--log-config-file no.json cannot be used"),
        ("--root-path llm", "root_path='llm'"),
    ],
)
def test_what_cannot_be_used_is_told_before_a_model_is_loaded(
    given: str, told: str, capsys: Any
) -> None:
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    assert main(["serve", "no-such-model", "--port", "0", *given.split()]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("nanoserve serve: ") and told in error


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_may_ask_for_certificates_of_clients(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-subj", "/CN=localhost"]
    command += ["-pkeyopt", "ec_paramgen_curve:P-256"]
    made = [*command, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    given = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    given += ["--ssl-ca-certs", str(certificate), "--ssl-cert-reqs", "2"]
    assert uvicorn_options(parse_args(given)) == {
        "ssl_keyfile": str(key),
        "ssl_certfile": str(certificate),
        "ssl_ca_certs": str(certificate),
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    }
    with pytest.raises(ValueError, match="cannot be used for TLS"):
        uvicorn_options(parse_args([*given, "--ssl-ciphers", "no-such-cipher"]))


def test_the_level_of_the_servers_log() -> None:
    assert uvicorn_options(parse_args([])) == {}
    assert uvicorn_options(parse_args(["--ssl-cert-reqs", "0"])) == {}
    assert uvicorn_options(parse_args(["--uvicorn-log-level", "debug"])) == {"log_level": "debug"}


def test_paths_are_left_out_of_the_access_log() -> None:
    without = WithoutPaths("/health, /metrics", "/llm")
    for path, is_logged in (
        *(("/health", False), ("/metrics?x=1", False), ("/v1/models", True)),
        *(("/llm/health", False), ("/llm/v1/health", True)),
    ):
        arguments = ("127.0.0.1:5", "GET", path, "1.1", 200)
        record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "%s", arguments, None)
        assert without.filter(record) is is_logged
    assert WithoutPaths("").filter(logging.makeLogRecord({"args": None}))
    with pytest.raises(ValueError, match="'metrics' must be like '/health'"):
        WithoutPaths("/health,metrics")


def test_a_file_configures_the_log(tmp_path: Path) -> None:
    file, log = tmp_path / "log.json", tmp_path / "server.log"
    handler = {"class": "logging.FileHandler", "filename": str(log), "formatter": "own"}
    file.write_text(json.dumps({
        "version": 1,
        "formatters": {"own": {"format": '{{"level": "{levelname}"}}', "style": "{"}},
        "handlers": {"own": handler},
        "loggers": {"nanoserve.test_of_logs": {"handlers": ["own"], "propagate": False}},
    }))  # fmt: skip
    config = read_log_config(str(file))
    logger = logging.getLogger("nanoserve.test_of_logs")
    logger.warning("x")
    assert log.read_text() == '{"level": "WARNING"}\n'
    assert config["disable_existing_loggers"] is False and read_log_config(None) is None
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
        handler.close()
    file.write_text('{"version": 7}')
    with pytest.raises(ValueError, match="--log-config-file"):
        read_log_config(str(file))
