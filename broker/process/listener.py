"""The socket at which a broker listens for clients and slaves."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from metamq.errors import ConfigError
from metamq.security.exposure import EXPOSED_HINT, exposure, is_exposed

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig

log = logging.getLogger("metamq.broker")


def bind(config: BrokerConfig, *, is_secure: bool) -> socket.socket:
    """Returns a socket that is bound, and does not listen yet. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}",
            hint="Choose another --port (0 takes a free one), or stop the program that uses it.",
        ) from error
    if not is_secure and is_exposed(config.host):
        log.warning("%s. %s", exposure(config.host, listener.getsockname()[1]), EXPOSED_HINT)
    return listener
