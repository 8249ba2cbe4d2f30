"""`python -m metamq.broker`: one broker, its settings from METAMQ_… variables and the file in $METAMQ_CONFIG.

Prints one line, "ready <port> <http port>", on standard output once it serves. With --with-parent it ends when its
standard input does. People use `metamq broker`.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from metamq.broker.config import BrokerConfig
from metamq.broker.process.parent import follow_parent
from metamq.broker.process.server import run_broker
from metamq.client.settings import cluster_access, load
from metamq.errors import ConfigError, ConnectError, MetamqError

if TYPE_CHECKING:
    from metamq.broker.process.server import Broker


def _ready(broker: Broker) -> None:
    print("ready", broker.port, broker.http_port, flush=True)


def main() -> int:
    """Runs until SIGTERM. The exit status is that of the command line: 2 usage, 3 unreachable, 1 failed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if "--with-parent" in sys.argv[1:]:
        follow_parent(sys.stdin.fileno())
    try:
        config = load(BrokerConfig, "broker", arguments={})
        if config.processes > 1:
            raise ConfigError(
                f"`python -m metamq.broker` runs one process, not {config.processes}",
                hint="Use `metamq broker`, or leave `processes` out.",
            )
        return run_broker(config, cluster_access(None, None, None, None), ready=_ready)
    except ConnectError as error:
        print(error, file=sys.stderr)
        return 3
    except MetamqError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
