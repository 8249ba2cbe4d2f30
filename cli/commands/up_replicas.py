"""The broker of `metamq up`: a process for each replica, and what is said when one of them ends.

A replica that ends is told, and the others go on: whoever killed it wants to see what they do. Who is the master is not
remembered here: that stands in ZooKeeper, and may change at any time. Nor is what was started by hand: that is why
ZooKeeper goes on when none of the processes started here is left. Only a broker without slaves takes it down.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metamq.cli.processes import BrokerChild
from metamq.cli.show.output import say
from metamq.client.admin.admin_model import ReplicaDescription
from metamq.errors import ConfigError, MetamqError
from metamq.zk.paths import DEFAULT_ROOT

BROKER_ID = 0
ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where a replica is to serve, and where its data is. Port 0 lets the system choose."""

    number: int
    host: str
    port: int
    http_port: int
    data: Path


class ReplicaProcess:
    """A replica's process."""

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
        """What starts it again by hand."""
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
        """Starts a process for each; they come up side by side."""
        for place in places:
            name = "the broker" if len(places) == 1 else f"replica {place.number}"
            settings = [f"--zookeeper={self._zookeeper}", *self._settings]
            self.members.append(ReplicaProcess(place, name, settings, folder / f"{place.data.name}.log", lock))
        import metamq.client.admin.admin  # noqa: F401 - takes its time, while the processes take theirs

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Raises as BrokerChild.wait_ready; ConfigError when the master is not among them."""
        for member in self.members:
            member.child.wait_ready(check)
        numbers = {member.number for member in self.members}
        for number, one in self.described().items():
            if one.role == "master" and number not in numbers:
                raise ConfigError(
                    f"replica {number} is the master of broker {BROKER_ID}, and is not among those to be started",
                    hint=f"Give --slaves {number}; then another one may be promoted.",
                )

    def described(self) -> dict[int, ReplicaDescription]:
        """The replicas by number, as they stand in ZooKeeper. Raises MetamqError."""
        from metamq import Admin

        with Admin(self._zookeeper, root=self._root) as admin:
            broker = admin.replicas().get(BROKER_ID)
            return {one.replica: one for one in broker.replicas} if broker is not None else {}

    def check_running(self) -> None:
        """Tells of a replica that has ended by itself. Raises MetamqError when the broker has no other."""
        for member in self.members:
            if not member.ended and (error := member.child.failure()) is not None:
                member.ended = True
                if len(self.members) == 1:
                    raise error
                self._tell(member, error)

    def _tell(self, ended: ReplicaProcess, error: MetamqError) -> None:
        try:
            known = self.described()
        except MetamqError:
            known = {}
        role = known[ended.number].role if ended.number in known else ""
        left = any(not member.ended for member in self.members)
        goes_on = "The others go on." if left else "No replica started here is left; ZooKeeper goes on until Ctrl-C."
        what = f"Replica {ended.number}, the {role}," if role else f"Replica {ended.number}"
        say(f"{what} {ended.child.how_it_ended()}. {goes_on}", fg="yellow")
        if not ended.child.was_killed():
            say(error.hint)
        if role == "master":
            others = [one for one in known.values() if one.in_sync and one.replica != ended.number]
            ready = [one.replica for one in others if one.address is not None and _answers(one.address)]
            if ready:
                say(f"To make a slave the master: metamq ha promote --broker {BROKER_ID} --slave {ready[0]}")
        say(f"To start it again: {ended.command()}")

    def end(self) -> None:
        """A graceful stop of those that run. Raises MetamqError when it is none."""
        living = [member.child for member in self.members if not member.ended]
        for child in living:
            child.terminate()
        for child in living:
            child.end()

    def stop(self) -> None:
        """Ends them, in whatever way is needed. May be repeated."""
        for member in self.members:
            member.child.terminate()
        for member in self.members:
            member.child.stop()


def _answers(address: str) -> bool:
    """Whether somebody listens there: a replica that was killed stays registered until its session ends."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return False
    return True
