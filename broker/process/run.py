"""Runs a broker on the fastest event loop of the platform."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from metamq.broker.process.server import Broker, serve
from metamq.private_files import restrict_process
from metamq.zk.paths import DEFAULT_ROOT

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig

COLLECTED_AFTER = 20_000
"""New objects per run of the garbage collector over young objects. Python's default of 700 is a few requests."""


def run_broker(
    config: BrokerConfig, zookeeper: str, *, root: str = DEFAULT_ROOT, ready: Callable[[Broker], None] = lambda _: None
) -> int:
    """Runs a broker until SIGTERM, SIGINT or SIGHUP; returns the exit status. Raises as Broker.start()."""
    restrict_process()
    gc.freeze()  # modules and classes never become garbage
    gc.set_threshold(COLLECTED_AFTER, *gc.get_threshold()[1:])
    work = serve(config, zookeeper, root=root, ready=ready)
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    status: int = uvloop.run(work)
    return status
