"""Options of KV connectors (`kv_transfer_config={...}`), under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.utils.checks import check_int, check_names, is_text, require, shown

_ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass(frozen=True)
class KVTransferConfig:
    """Options of a KV connector, with vLLM's fields.

    kv_connector: a name in `nanoserve.features.kv_transfer.connector.KV_CONNECTORS`, or, with
        `kv_connector_module_path`, the name of a class in that module.
    kv_role: "kv_producer" only stores blocks, "kv_consumer" only loads them, "kv_both" does both.
    kv_buffer_size: bytes of the host's memory through which blocks pass. One load is at most as
        long; tokens beyond it are computed.
    kv_ip: address of the connector "socket": of this machine for a producer (default: 127.0.0.1),
        of the producer's for a consumer (default: that of its URL). With a slash it is the path of
        a Unix socket.
    kv_port: TCP port of the connector "socket".
    kv_connector_module_path: module of the class that `kv_connector` names.
    kv_connector_extra_config: options of the connector itself, and `load_timeout`: seconds after
        which a request that waits for a load is computed instead.

    Raises `ValueError` for unknown names and values.
    """

    kv_connector: str = ""
    kv_role: str = "kv_both"
    kv_buffer_size: float = 1e9
    kv_ip: str | None = None
    kv_port: int = 14579
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: "Mapping[str, Any] | KVTransferConfig") -> "KVTransferConfig":
        """Return the value passed to `EngineConfig` as a `KVTransferConfig`."""
        if isinstance(options, KVTransferConfig):
            return options
        example = (
            "{'kv_connector': 'disk', 'kv_connector_extra_config': {'path': '/var/cache/blocks'}}"
        )
        check_names("kv_transfer_config", options, cls, example)
        return cls(**options)

    @classmethod
    def on_disk(cls, path: str | Path) -> "KVTransferConfig":
        """Return the options for which `kv_offloading_path` is short."""
        return cls("disk", kv_connector_extra_config={"path": str(path)})

    def __post_init__(self) -> None:
        require(
            is_text(self.kv_connector),
            f"kv_transfer_config needs the name of a connector, such as 'disk' (got kv_connector="
            f"{shown(self.kv_connector)})",
        )
        require(
            self.kv_role in _ROLES, f"kv_role={shown(self.kv_role)} must be one of {list(_ROLES)}"
        )
        size = self.kv_buffer_size
        is_whole = isinstance(size, float) and size.is_integer()
        check_int("kv_buffer_size", int(size) if is_whole else size, 1)
        address = self.kv_ip
        require(
            address is None or is_text(address),
            f"kv_ip={shown(address)} must be an address such as '0.0.0.0', or the path of a Unix "
            f"socket",
        )
        check_int("kv_port", self.kv_port, 1, 65535)
        module = self.kv_connector_module_path
        require(
            module is None or is_text(module),
            f"kv_connector_module_path={shown(module)} must be the name of a module",
        )
        extra = self.kv_connector_extra_config
        require(
            isinstance(extra, Mapping) and all(map(is_text, extra)),
            f"kv_connector_extra_config={shown(extra)} must be a dictionary with strings as keys",
        )

    @property
    def stores(self) -> bool:
        """True if the engine's blocks go to the connector."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """True if blocks come from the connector."""
        return self.kv_role != "kv_producer"
