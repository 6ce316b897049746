"""The connector "socket", one side of which is a prefill engine and the other a decode engine.

    decode engine (kv_consumer)                       prefill engine (kv_producer)
    find: is the prompt long enough?
    load: reserve its blocks, which are not there yet  --> lease
          POST /v1/completions, max_tokens=1           --> computes the prompt
                                                           store: the blocks of leases are kept
          check each block                             <-- and sent, in order
          confirm                                      --> the lease ends

Blocks are sent while the rest of a prompt is still computed. No request depends on the other side:
what does not arrive in time is computed by the decode engine. See docs/guides.
"""

from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.kv_transfer.connector import ConnectorContext
from nanoserve.features.kv_transfer.pair.consumer import Consumer
from nanoserve.features.kv_transfer.pair.options import ConsumerOptions, ProducerOptions
from nanoserve.features.kv_transfer.pair.producer import Producer
from nanoserve.utils.checks import require


class SocketConnector:
    """Makes the side of the connector that is named by `kv_role`."""

    load_timeout = 60.0  # seconds: a prompt may wait for others at the prefill server

    def check(self, config: KVTransferConfig, block_bytes: int) -> None:
        """Raise `ValueError` for options that cannot be used, or a port that is in use."""
        require(
            config.kv_role != "kv_both",
            "the socket connector needs kv_role='kv_producer' for the engine that computes "
            "prompts, or 'kv_consumer' for the one that decodes (got 'kv_both')",
        )
        if config.kv_role == "kv_consumer":
            ConsumerOptions.of(config)
            return
        address = ProducerOptions.of(config).address
        address.listen().close()
        address.remove()

    def __call__(self, context: ConnectorContext) -> Producer | Consumer:
        return Producer(context) if context.config.stores else Consumer(context)


SOCKET_CONNECTOR = SocketConnector()
