"""Flags of `nanoserve serve` for its sockets, its log, and what stands around its endpoints."""

import json
import logging
import logging.config
import ssl
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from functools import partial
from typing import Any

from nanoserve.cli.parser import Words
from nanoserve.utils.checks import require

_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")


def add_operation_flags(group: "_ArgumentGroup | ArgumentParser") -> None:
    """Add the flags. Those of `ServerSettings` are absent from the namespace if not passed."""
    _add_sockets(group)
    _add_settings(group)
    _add_logs(group)


def _add_sockets(group: "_ArgumentGroup | ArgumentParser") -> None:
    add = group.add_argument
    uds = "Unix domain socket to listen on, instead of host and port. Default: none."
    add("--uds", metavar="PATH", help=uds)
    add("--ssl-keyfile", metavar="FILE", help="Private key for HTTPS. Default: plain HTTP.")
    add("--ssl-certfile", metavar="FILE", help="Certificate for HTTPS. Default: plain HTTP.")
    certificates = "Certificates of authorities that sign the clients'. Default: none."
    add("--ssl-ca-certs", metavar="FILE", help=certificates)
    required = "Certificates of clients: 0 (none), 1 (optional) or 2 (required). Default: 0."
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), metavar="N", help=required)
    add("--ssl-ciphers", metavar="NAMES", help="Ciphers of TLS 1.2. Default: Python's.")
    refresh = "Load certificate and key again when their files change."
    add("--enable-ssl-refresh", action=BooleanOptionalAction, default=SUPPRESS, help=refresh)


def _add_settings(group: "_ArgumentGroup | ArgumentParser") -> None:
    """Add the flags of `ServerSettings`, which has their defaults."""
    add = partial(group.add_argument, default=SUPPRESS)
    credentials = "Let pages of --allowed-origins send cookies and other credentials."
    add("--allow-credentials", action=BooleanOptionalAction, help=credentials)
    methods = "Methods that pages of --allowed-origins may use. Default: all."
    add("--allowed-methods", action=Words, metavar="METHOD", help=methods)
    headers = "Headers that pages of --allowed-origins may send. Default: all."
    add("--allowed-headers", action=Words, metavar="NAME", help=headers)
    prefix = "Prefix of all paths, as /llm, for a server behind a proxy. Default: none."
    add("--root-path", metavar="PATH", help=prefix)
    middleware = "ASGI middleware around all endpoints: a class, or an async function of a "
    middleware += "request and call_next. The flag may be repeated. Default: none."
    add("--middleware", action="extend", nargs="+", metavar="MODULE:NAME", help=middleware)
    load = "Add /load, which has the number of requests in progress."
    add("--enable-server-load-tracking", action=BooleanOptionalAction, help=load)
    docs = "Add /openapi.json, the schema of the API, and /docs, a page of it."
    add("--enable-offline-docs", action=BooleanOptionalAction, help=docs)
    usage = "End every stream with its usage, whatever the request says."
    add("--enable-force-include-usage", action=BooleanOptionalAction, help=usage)
    ids = "Write tokens in logprobs as token_id:5 unless a request decides otherwise."
    add("--return-tokens-as-token-ids", action=BooleanOptionalAction, help=ids)


def _add_logs(group: "_ArgumentGroup | ArgumentParser") -> None:
    add = group.add_argument
    level = "Level of the log of the HTTP server. Default: info with --access-log, else warning."
    add("--uvicorn-log-level", choices=_LEVELS, metavar="LEVEL", help=level)
    paths = "Paths whose requests --access-log leaves out, as /health,/metrics. Default: none."
    add("--disable-access-log-for-endpoints", metavar="PATHS", help=paths)
    config = "JSON file for Python's logging.config.dictConfig. Default: lines of text on stderr."
    add("--log-config-file", metavar="FILE", help=config)


def uvicorn_options(args: Namespace) -> dict[str, Any]:
    """Return the options of the HTTP server for TLS and the log.

    Raises `ValueError` or `OSError` for files and values that do not fit together, so that they are
    reported before a model is loaded.
    """
    tls = {name: getattr(args, name) for name in _TLS if getattr(args, name) not in (None, 0)}
    if getattr(args, "enable_ssl_refresh", False):
        tls["ssl_refresh"] = True
    if tls:
        _check_tls(tls)
    level = args.uvicorn_log_level
    return tls if level is None else tls | {"log_level": level}


def _check_tls(tls: dict[str, Any]) -> None:
    for name in ("ssl_keyfile", "ssl_certfile"):
        message = f"{tls} is not enough; TLS needs --ssl-keyfile and --ssl-certfile"
        require(name in tls, message)
    has_authorities = "ssl_ca_certs" in tls or not tls.get("ssl_cert_reqs")
    reqs = tls.get("ssl_cert_reqs")
    require(has_authorities, f"--ssl-cert-reqs {reqs} needs --ssl-ca-certs FILE")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, a key that needs one is an error, not a question on the terminal.
        context.load_cert_chain(tls["ssl_certfile"], tls["ssl_keyfile"], password="")
        if "ssl_ca_certs" in tls:
            context.load_verify_locations(tls["ssl_ca_certs"])
        context.set_ciphers(tls.get("ssl_ciphers", "DEFAULT"))
    except OSError as error:  # an `SSLError` is one, too
        raise ValueError(f"{tls} cannot be used for TLS: {error}") from error


def check_sockets(args: Namespace, default_host: str, default_port: int) -> None:
    """Raise `ValueError` for flags that contradict each other, of sockets or of the log."""
    has_port = args.host != default_host or args.port != default_port
    message = f"--uds {args.uds} is instead of --host and --port; remove one or the other"
    require(args.uds is None or not has_port, message)
    require(args.uds != "", "--uds needs the path of a socket")
    contradicts = args.access_log and getattr(args, "disable_uvicorn_access_log", False)
    require(not contradicts, "--access-log and --disable-uvicorn-access-log exclude each other")
    level = args.uvicorn_log_level
    hides = level in _LEVELS[: _LEVELS.index("info")]
    message = f"--access-log writes lines of level info, which --uvicorn-log-level {level} hides"
    require(not (args.access_log and hides), message)


def read_log_config(path: str | None) -> dict[str, Any] | None:
    """Return the configuration of Python's logging in a JSON file; None without one.

    Raises `ValueError` for a file that cannot be read as such, after having tried it.
    """
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        config.setdefault("disable_existing_loggers", False)  # those of this process exist already
        logging.config.dictConfig(config)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"--log-config-file {path} cannot be used: {error}") from error
    return config


def configure_logging(config: dict[str, Any], engine: Any) -> None:
    """Configure the log of an engine's process like that of the server's."""
    logging.config.dictConfig(config)


class WithoutPaths(logging.Filter):
    """A filter of uvicorn's access log that leaves out requests for some paths."""

    def __init__(self, paths: str, root_path: str = "") -> None:
        """`paths`: separated by commas, without the prefix `root_path`.

        Raises `ValueError` for one that does not begin with a slash.
        """
        super().__init__()
        self._root_path = root_path
        self._paths = {path.strip() for path in paths.split(",") if path.strip()}
        for path in self._paths:
            message = f"--disable-access-log-for-endpoints: {path!r:.80} must be like '/health'"
            require(path.startswith("/"), message)

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, version, status.
        arguments = record.args if isinstance(record.args, tuple) else ()
        path = str(arguments[2]).partition("?")[0] if len(arguments) > 2 else ""
        return path.removeprefix(self._root_path) not in self._paths
