"""The settings of each worker: the settings of the command, divided. No I/O.

id, port                 the next number for each worker; port 0 stays 0
data                     a folder of its own, see metamq.broker.workers.places
audit                    a file of its own: `audit.log` becomes `audit-2.log` for broker 2; `-` stays
http_port                none: the supervisor serves the pages of all workers
what the machine has     an equal share: memory, log files kept open, bytes per second of the scrub and of links
everything else          the same; so are the limits of connections, since each client connects to each worker
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metamq.broker.config import BROKER_ID_MAX, MEBIBYTE
from metamq.errors import ConfigError
from metamq.wire.limits import FRAME_BYTES_MAX
from metamq.words import count

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig

PORT_MAX = 65_535
SHARED = {
    "answer_memory_bytes": MEBIBYTE,
    "request_memory_bytes": FRAME_BYTES_MAX,
    "open_files_max": 1,
    "scrub_bytes_per_s": 1,
    "replication_bytes_per_s": 1,
}
"""The settings that workers share, with the least share. A value of 0 has a meaning of its own, and stays."""


def ids_of(config: BrokerConfig) -> range:
    """Returns the broker ids of the command. Raises ConfigError if they, or the ports, do not fit."""
    last = config.processes - 1
    if config.id + last > BROKER_ID_MAX:
        raise ConfigError(
            f"--processes {config.processes} with --id {config.id} needs broker ids up to {config.id + last:,}, "
            f"above {BROKER_ID_MAX:,}",
            hint="Choose a lower --id.",
        )
    ports = range(config.port, config.port + config.processes) if config.port else range(0)
    if config.port + last > PORT_MAX:
        raise ConfigError(
            f"--processes {config.processes} with --port {config.port} needs ports up to {config.port + last:,}, "
            f"above {PORT_MAX:,}",
            hint="Choose a lower --port, or 0 for free ports.",
        )
    if config.http_port in ports:
        raise ConfigError(
            f"the brokers need the ports {ports[0]} to {ports[-1]}, and --http-port {config.http_port} is one of them",
            hint="Choose another --http-port, or another --port.",
        )
    return range(config.id, config.id + config.processes)


def divided(config: BrokerConfig, folders: Sequence[Path]) -> list[BrokerConfig]:
    """Returns the settings of each worker, in the order of their ids. `folders`: the data folder of each."""
    shares: dict[str, Any] = {
        name: max(least, getattr(config, name) // config.processes) if getattr(config, name) else 0
        for name, least in SHARED.items()
    }
    return [
        replace(config, **shares | _own(config, number), data=str(folder), http_port=-1, processes=1)
        for number, folder in enumerate(folders)
    ]


def _own(config: BrokerConfig, number: int) -> dict[str, Any]:
    """Returns the settings in which the worker with this number differs from the others."""
    broker_id = config.id + number
    port = config.port + number if config.port else 0
    return {"id": broker_id, "port": port, "audit": _named(config.audit, broker_id)}


def _named(audit: str, broker_id: int) -> str:
    if audit in ("", "-"):
        return audit
    path = Path(audit)
    return str(path.with_name(f"{path.stem}-{broker_id}{path.suffix}"))


def too_many(processes: int, cores: int) -> str | None:
    """Returns a warning if there are more workers than cores, or None."""
    if processes <= cores:
        return None
    return (
        f"{processes} processes share {count(cores, 'core')}: more processes than cores cost memory and connections, "
        "and add no throughput"
    )
