"""An ensemble of three ZooKeeper servers on this machine."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ensemble import Ensemble
from metamq.zk.server.ports import HeldPort
from tests.parts import wait_until

NUMBERS = (1, 2, 3)
ALL_THERE = ["follower", "follower", "leader"]


def mode(server: EmbeddedZooKeeper) -> str:
    """Returns "leader" or "follower"; "" while the server serves no client."""
    try:
        with socket.create_connection(("127.0.0.1", server.port), 1) as connection:
            connection.sendall(b"srvr")
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
    except OSError:
        return ""
    return answer.partition(b"Mode: ")[2].partition(b"\n")[0].decode()


class Servers:
    """Three servers on this machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._ports = [(HeldPort("127.0.0.1"), HeldPort("127.0.0.1")) for _ in NUMBERS]
        places = ",".join(f"127.0.0.1:{leader.number}:{election.number}" for leader, election in self._ports)
        self.by_number = {
            number: EmbeddedZooKeeper(folder / f"zookeeper-{number}", ensemble=Ensemble.parse(number, places))
            for number in NUMBERS
        }
        for server in self.by_number.values():
            stack.callback(server.stop)
        with ThreadPoolExecutor() as pool:  # none serves before another one runs
            list(pool.map(EmbeddedZooKeeper.start, self.by_number.values()))
        self.wait_for_all()

    @property
    def address(self) -> str:
        return ",".join(server.address for server in self.by_number.values())

    def modes(self) -> dict[int, str]:
        return {number: mode(server) for number, server in self.by_number.items()}

    def wait_for_all(self) -> None:
        wait_until(lambda: sorted(self.modes().values()) == ALL_THERE)

    def number_of(self, wanted: str) -> int:
        return next(number for number, server in self.by_number.items() if mode(server) == wanted)

    def wait_for_another_leader(self, than: int) -> None:
        others = [server for number, server in self.by_number.items() if number != than]
        wait_until(lambda: "leader" in map(mode, others), what="another leader")
