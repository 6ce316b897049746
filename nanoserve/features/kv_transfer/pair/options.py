"""Options of the connector "socket", checked before any weight is read."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.kv_transfer.pair.addresses import Address
from nanoserve.utils.checks import check_int, check_number, is_text, require, shown

API_KEY = "NANOSERVE_API_KEY"  # the environment variable of both servers
_LEASE_TIMEOUT, _MIN_TOKENS, _PATIENCE = 120.0, 64, 1.0
_EXAMPLE = "http://prefill-host:8000"


@dataclass(frozen=True)
class ProducerOptions:
    """Options of a prefill engine.

    address: where decode engines connect.
    lease_timeout: the longest time in seconds for which blocks are kept for a decode engine.
    """

    address: Address
    lease_timeout: float

    @classmethod
    def of(cls, config: KVTransferConfig) -> "ProducerOptions":
        """Return the options in `config`; raises `ValueError` for one that cannot be used."""
        options = config.kv_connector_extra_config
        _check_names(options, ("lease_timeout",), "kv_producer")
        timeout = options.get("lease_timeout", _LEASE_TIMEOUT)
        check_number("lease_timeout", timeout, 0, excludes_low=True)
        return cls(Address(config.kv_ip or "127.0.0.1", config.kv_port), float(timeout))


@dataclass(frozen=True)
class ConsumerOptions:
    """Options of a decode engine.

    url: of the prefill server, without a path. address: where its engine sends blocks from.
    min_tokens: a prompt is computed here if fewer tokens of it are missing.
    patience: seconds to wait for the next block after the prefill server has answered.
    """

    url: SplitResult
    address: Address
    min_tokens: int
    patience: float
    api_key: str | None

    @classmethod
    def of(cls, config: KVTransferConfig) -> "ConsumerOptions":
        """Return the options in `config`; raises `ValueError` for one that cannot be used."""
        options = config.kv_connector_extra_config
        _check_names(options, ("prefill_server", "min_tokens", "patience"), "kv_consumer")
        url = prefill_url(options.get("prefill_server"))
        patience = options.get("patience", _PATIENCE)
        return cls(
            url,
            Address(config.kv_ip or url.hostname or "", config.kv_port),
            check_int("min_tokens", options.get("min_tokens", _MIN_TOKENS), 1),
            float(check_number("patience", patience, 0, excludes_low=True)),
            os.environ.get(API_KEY) or None,
        )


def prefill_url(text: Any) -> SplitResult:
    """Return the URL of a prefill server; raises `ValueError` for anything else."""
    wanted = f"prefill_server={shown(text)} must be a URL such as '{_EXAMPLE}'"
    require(is_text(text), wanted)
    try:
        url = urlsplit(text)
        port = url.port
        (url.hostname or "").encode("idna")
    except ValueError as error:
        raise ValueError(f"{wanted}: {error}") from None
    require(url.scheme in ("http", "https") and bool(url.hostname) and port != 0, wanted)
    rest = url.path not in ("", "/") or url.query or url.fragment or url.username or url.password
    require(not rest, f"{wanted}, without a path, a query or a name")
    return url


def _check_names(options: Collection[str], known: Collection[str], role: str) -> None:
    unknown = sorted(set(options) - set(known))
    require(
        not unknown,
        f"the socket connector has no options {unknown} with kv_role={role!r}, only "
        f"{[*known, 'load_timeout']}",
    )
