"""The servers of a ZooKeeper ensemble, and the place of one server in it.

An ensemble answers while more than half of its servers run and reach each other. Each server has three ports: one for
clients, one on which the leader takes followers, one for elections. All servers get the same list in the same order:
the number of a server is its place in it, from 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from metamq.errors import ConfigError

LEADER_PORT, ELECTION_PORT = 2888, 3888
SERVERS_MAX = 99
JOIN_MS = 120_000
"""Milliseconds in which a follower must have loaded the leader's data."""
SYNC_MS = 3_000
"""Milliseconds after which followers give up a silent leader, and a leader a silent follower. A broker's lease is
longer if its `session_timeout_ms` is above 4,500."""

_SERVER = re.compile(r"(\[[\w:.%]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}):([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Ensemble:
    """All servers, as "host:leader port:election port", and the number of this one."""

    number: int
    servers: tuple[str, ...]

    @classmethod
    def parse(cls, number: int, text: str) -> Self:
        """The ensemble of "a,b,c" or "a:2888:3888,b:2888:3888". Raises ConfigError, which names the wrong part."""
        servers = tuple(_server(part.strip(), text) for part in text.split(","))
        places = [(host, port) for host, *ports in (one.rsplit(":", 2) for one in servers) for port in ports]
        if len(set(places)) < len(places):
            raise ConfigError(
                f"two servers of the ensemble {text!r} have the same host and port",
                hint="Servers on one host need different ports, as in h:2888:3888,h:2889:3889,...",
            )
        if not 2 < len(servers) <= SERVERS_MAX:
            raise ConfigError(
                f"an ensemble has 3 to {SERVERS_MAX} servers, not {len(servers)}: {text!r}",
                hint="Three outlive the loss of one server, five the loss of two. For one server leave --ensemble out.",
            )
        if not 1 <= number <= len(servers):
            raise ConfigError(
                f"server {number} is not in the ensemble {text!r}",
                hint=f"The number is the place in the list: 1 to {len(servers)}.",
            )
        return cls(number, servers)

    @property
    def quorum(self) -> int:
        """The number of servers that must run."""
        return len(self.servers) // 2 + 1

    def settings(self, tick_ms: int) -> dict[str, object]:
        """Returns the settings of the ensemble for zoo.cfg."""
        return {
            "initLimit": JOIN_MS // tick_ms,
            "syncLimit": SYNC_MS // tick_ms,
            **{f"server.{number}": server for number, server in enumerate(self.servers, 1)},
        }


def _server(part: str, text: str) -> str:
    match = _SERVER.fullmatch(part)
    ports = (int(match[2] or LEADER_PORT), int(match[3] or ELECTION_PORT)) if match else (0, 0)
    if match is None or not all(0 < port < 65_536 for port in ports) or ports[0] == ports[1]:
        raise ConfigError(
            f"{part!r} in the ensemble {text!r} is not a server",
            hint='Write a host, or host:leader port:election port, as in "zk1,zk2,zk3" or "zk1:2888:3888,...".',
        )
    return f"{match[1]}:{ports[0]}:{ports[1]}"
