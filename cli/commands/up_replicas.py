"""The broker of `metamq up`: a process for each replica, and the messages when one of them ends.

If a replica ends, the command reports it and the others continue: a user who killed it wants to see how they take over.
The roles are not stored here: they are in ZooKeeper, and may change at any time. Replicas that a user started by hand
are not stored either. So ZooKeeper keeps running when no process started here is left. Only the end of a broker without
slaves ends the command.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.cli.processes import BrokerChild
from metamq.cli.show.output import say
from metamq.errors import ConfigError, MetamqError
from metamq.zk.paths import DEFAULT_ROOT

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import ReplicaDescription

BROKER_ID = 0
ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The address and the data folder of a replica. Port 0 lets the system choose."""

    number: int
    host: str
    port: int
    http_port: int
    data: Path


class ReplicaProcess:
    """The process of a replica."""

    def __init__(self, place: ReplicaPlace, name: str, settings: list[str], log_path: Path, lock: int) -> None:
        self.number = place.number
        self.ended = False
        self._place = place
        self._settings = settings
        here = [f"--id={BROKER_ID}", f"--host={place.host}", f"--advertise={place.host}", f"--replica={place.number}"]
        here += [f"--port={place.port}", f"--http-port={place.http_port}", f"--data={place.data}"]
        self.child = BrokerChild([*here, *settings], log_path, name=name, pass_fds=(lock,))

    @property
    def address(self) -> str:
        return f"{self._place.host}:{self.child.port}"

    @property
    def metrics(self) -> str | None:
        """The URL of its metrics; None when it serves none."""
        return f"http://{self._place.host}:{self.child.http_port}/metrics" if self.child.http_port > 0 else None

    def command(self) -> str:
        """Returns the command that starts the replica again."""
        here = ["--replica", str(self.number), "--port", str(self.child.port), "--http-port", str(self.child.http_port)]
        return shlex.join(["metamq", "broker", *here, "--data", str(self._place.data), *self._settings])


class Replicas:
    """All replicas of the broker, from `start` to `stop`."""

    def __init__(self, zookeeper: str, root: str, config: str | None) -> None:
        self.members: list[ReplicaProcess] = []
        self._zookeeper = zookeeper
        self._root = root
        self._settings = [] if root == DEFAULT_ROOT else [f"--root={root}"]
        if config:
            self._settings.append(f"--config={config}")

    def start(self, places: list[ReplicaPlace], folder: Path, lock: int) -> None:
        """Starts a process for each place, all at the same time."""
        for place in places:
            name = "the broker" if len(places) == 1 else f"replica {place.number}"
            settings = [f"--zookeeper={self._zookeeper}", *self._settings]
            self.members.append(ReplicaProcess(place, name, settings, folder / f"{place.data.name}.log", lock))
        import metamq.client.admin.admin  # noqa: F401 - a slow import, while the processes start

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Waits until all replicas serve. Raises as BrokerChild.wait_ready; ConfigError if the master is not here."""
        for member in self.members:
            member.child.wait_ready(check)
        numbers = {member.number for member in self.members}
        for number, one in self.described().items():
            if one.role == "master" and number not in numbers:
                raise ConfigError(
                    f"replica {number} is the master of broker {BROKER_ID}, but this command does not start it",
                    hint=f"Give --slaves {number}. Then you can promote another replica.",
                )

    def described(self) -> dict[int, ReplicaDescription]:
        """Returns the replicas by number, from ZooKeeper. Raises MetamqError."""
        from metamq import Admin

        with Admin(self._zookeeper, root=self._root) as admin:
            broker = admin.replicas().get(BROKER_ID)
            return {one.replica: one for one in broker.replicas} if broker is not None else {}

    def check_running(self) -> None:
        """Reports a replica that has ended by itself. Raises MetamqError if the broker has no other replica."""
        for member in self.members:
            if not member.ended and (error := member.child.failure()) is not None:
                member.ended = True
                if len(self.members) == 1:
                    raise error
                self._report_end(member, error)

    def _report_end(self, ended: ReplicaProcess, error: MetamqError) -> None:
        try:
            known = self.described()
        except MetamqError:
            known = {}
        role = known[ended.number].role if ended.number in known else ""
        left = any(not member.ended for member in self.members)
        effect = "The others continue." if left else "No replica started here is left; ZooKeeper runs until Ctrl-C."
        what = f"Replica {ended.number}, the {role}," if role else f"Replica {ended.number}"
        say(f"{what} {ended.child.how_it_ended()}. {effect}", fg="yellow")
        if not ended.child.was_killed():
            say(error.hint)
        if role == "master":
            others = [one for one in known.values() if one.in_sync and one.replica != ended.number]
            ready = [one.replica for one in others if one.address is not None and _answers(one.address)]
            if ready:
                say(f"To make a slave the master: metamq ha promote --broker {BROKER_ID} --slave {ready[0]}")
        say(f"To start it again: {ended.command()}")

    def end(self) -> None:
        """Stops the running replicas gracefully. Raises MetamqError if one fails while it stops."""
        living = [member.child for member in self.members if not member.ended]
        for child in living:
            child.terminate()
        for child in living:
            child.end()

    def stop(self) -> None:
        """Ends all replicas, with SIGKILL if necessary. May be repeated."""
        for member in self.members:
            member.child.terminate()
        for member in self.members:
            member.child.stop()


def _answers(address: str) -> bool:
    """Returns True if a process listens there: a killed replica stays registered until its session ends."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return False
    return True
