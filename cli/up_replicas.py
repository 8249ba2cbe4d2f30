"""The broker of `metamq up`: a process for each replica, and the messages when one of them ends.

If a replica ends, the command reports it and the others continue. If it was the master, a slave takes over by itself,
unless the mode of failover is manual.
The roles are not stored here: they are in ZooKeeper, and may change at any time. Replicas that a user started by hand
are not stored either. So ZooKeeper keeps running when no process started here is left. Only the end of a broker without
slaves ends the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.cli.show.output import say
from metamq.errors import ConfigError, MetamqError, Timeout
from metamq.zk.paths import DEFAULT_ROOT
from metamq.zk.server.embedded import how_it_ended

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import BrokerReplicas, ReplicaDescription

BROKER_ID = 0
ANSWER_S = 1.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
LOG_LINES = 12
ERROR_PREFIX = "metamq: "
"""The beginning of the error message of a command that fails."""
POLL_S = 0.05
KILLED_HINT = "A user killed it, or the kernel did because memory ran out. The log cannot show which."


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The address and the data folder of a replica. Port 0 lets the system choose."""

    number: int
    host: str
    port: int
    http_port: int
    data: Path


class ReplicaProcess:
    """A replica, as a `metamq broker` process whose log goes to a file."""

    def __init__(self, place: ReplicaPlace, name: str, settings: list[str], log_path: Path, lock: int) -> None:
        """Starts the process. `name` is for messages. `lock` stays open in the process, which so keeps the lock."""
        self.number = place.number
        self.ended = False
        """True after the process has ended by itself, and that is reported."""
        self.port = 0
        self.http_port = 0
        self._name = name
        self._is_terminated = False
        self._place = place
        self._settings = settings
        self._log_path = log_path
        here = [f"--id={BROKER_ID}", f"--host={place.host}", f"--advertise={place.host}", f"--replica={place.number}"]
        here += [f"--port={place.port}", f"--http-port={place.http_port}", f"--data={place.data}"]
        here += ["--processes=1", "--with-parent", "--output=json"]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "metamq.cli",
                    "broker",
                    *here,
                    *settings,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                pass_fds=(lock,),
                # Ctrl-C goes to the whole foreground group: the parent decides when its children end.
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        return f"{self._place.host}:{self.port}"

    @property
    def metrics(self) -> str | None:
        """The URL of its metrics; None when it serves none."""
        return f"http://{self._place.host}:{self.http_port}/metrics" if self.http_port > 0 else None

    def command(self) -> str:
        """Returns the command that starts the replica again, with the folder of its certificates."""
        folder = os.environ.get("METAMQ_SECURITY_DIR")
        variables = f"METAMQ_SECURITY_DIR={shlex.quote(folder)} " if folder else ""
        here = ["--replica", str(self.number), "--port", str(self.port), "--http-port", str(self.http_port)]
        return variables + shlex.join(["metamq", "broker", *here, "--data", str(self._place.data), *self._settings])

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Waits until the replica serves. Raises MetamqError, with the end of its log, if it ends first; Timeout.

        `check` is called often; an exception that it raises ends the wait.
        """
        assert self._process.stdout is not None
        answer = select.poll()
        answer.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answer.poll(POLL_S * 1000):
            check()
            if time.monotonic() > deadline:
                raise Timeout(f"the start of {self._name}", START_TIMEOUT_S, hint=self._end_of_log())
        line = self._process.stdout.readline()
        if line:
            address = json.loads(line)
            self.port, self.http_port = address["port"], address["http_port"]
            return
        status = self._process.wait()
        raise MetamqError(f"{self._name} {how_it_ended(status)} before it served", hint=self._end_of_log())

    def failure(self) -> MetamqError | None:
        """Returns None while the process runs; after it has ended by itself, the error with the end of its log."""
        if self._process.poll() is None:
            return None
        hint = KILLED_HINT if self.was_killed() else self._end_of_log()
        return MetamqError(f"{self._name} {self.how_it_ended()}", hint=hint)

    def how_it_ended(self) -> str:
        """Describes the end of the process, which must have ended: "was ended by SIGKILL"."""
        return how_it_ended(self._process.wait())

    def was_killed(self) -> bool:
        """True if SIGKILL ended the process: then its log has no reason."""
        return self._process.wait() == -signal.SIGKILL

    def _end_of_log(self) -> str:
        """Returns the error message in the log of this process, or else the last lines of the log."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"Its log {self._log_path} cannot be read: {error.strerror}"
        errors = [number for number, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
        shown = lines[errors[-1] :] if errors else lines[-LOG_LINES:]
        return "\n    ".join([f"Its log {self._log_path} ends:", *shown])

    def end(self) -> None:
        """Stops the process gracefully. Raises MetamqError if it fails while it stops."""
        status = self.stop()
        if status:
            raise MetamqError(f"{self._name} {how_it_ended(status)} while it stopped", hint=self._end_of_log())

    def terminate(self) -> None:
        """Sends SIGTERM, once: a second one could come after the process has removed its handler."""
        if not self._is_terminated and self._process.poll() is None:
            self._is_terminated = True
            self._process.terminate()

    def stop(self) -> int:
        """Sends SIGTERM, then SIGKILL after a time; waits for the end and returns the status. May be repeated."""
        if self._process.poll() is None:
            self.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also after a second Ctrl-C: the child must not write after this call
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self._process.wait()


class Replicas:
    """All replicas of the broker, from `start` to `stop`."""

    def __init__(self, zookeeper: str, root: str, config: str | None, console_url: str, *, is_auto: bool) -> None:
        """`is_auto`: the mode of failover is auto, if the broker id has none yet. `console_url`: empty for none."""
        self.members: list[ReplicaProcess] = []
        self._zookeeper = zookeeper
        self._root = root
        self._settings = [] if root == DEFAULT_ROOT else [f"--root={root}"]
        if config:
            self._settings.append(f"--config={config}")
        if is_auto:
            self._settings.append("--failover=auto")
        if console_url:
            self._settings.append(f"--console-url={console_url}")

    def start(self, places: list[ReplicaPlace], folder: Path, lock: int) -> None:
        """Starts a process for each place, all at the same time."""
        for place in places:
            name = "the broker" if len(places) == 1 else f"replica {place.number}"
            settings = [f"--zookeeper={self._zookeeper}", *self._settings]
            self.members.append(ReplicaProcess(place, name, settings, folder / f"{place.data.name}.log", lock))
        import metamq.client.admin.admin  # noqa: F401 - a slow import, while the processes start

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Waits until all replicas serve. Raises as ReplicaProcess does; ConfigError if the master is not here."""
        for member in self.members:
            member.wait_ready(check)
        numbers = {member.number for member in self.members}
        for number, one in self.described().items():
            if one.role == "master" and number not in numbers:
                raise ConfigError(
                    f"replica {number} is the master of broker {BROKER_ID}, but this command does not start it",
                    hint=f"Give --slaves {number}. Then you can promote another replica.",
                )

    def described(self) -> dict[int, ReplicaDescription]:
        """Returns the replicas by number, from ZooKeeper. Raises MetamqError."""
        broker = self._broker()
        return {one.replica: one for one in broker.replicas} if broker is not None else {}

    def _broker(self) -> BrokerReplicas | None:
        from metamq import Admin

        with Admin(self._zookeeper, root=self._root) as admin:
            return admin.replicas().get(BROKER_ID)

    def check_running(self) -> None:
        """Reports a replica that has ended by itself. Raises MetamqError if the broker has no other replica."""
        for member in self.members:
            if not member.ended and (error := member.failure()) is not None:
                member.ended = True
                if len(self.members) == 1:
                    raise error
                self._report_end(member, error)

    def _report_end(self, ended: ReplicaProcess, error: MetamqError) -> None:
        broker = None
        with contextlib.suppress(MetamqError):
            broker = self._broker()
        master = _master_of(broker)
        left = any(not member.ended for member in self.members)
        effect = "The others continue." if left else "No replica started here is left; ZooKeeper runs until Ctrl-C."
        what = f"Replica {ended.number}, the master," if master == ended.number else f"Replica {ended.number}"
        say(f"{what} {ended.how_it_ended()}. {effect}", fg="yellow")
        if not ended.was_killed():
            say(error.hint)
        if broker is not None and master == ended.number:
            say(_succession(broker))
        elif master is not None:
            say(f"Replica {master} is the master.")
        say(f"To start it again: {ended.command()}")

    def end(self) -> None:
        """Stops the running replicas gracefully, slaves first. So none takes over, and the roles do not change.

        Raises MetamqError if one fails while it stops.
        """
        master = None
        with contextlib.suppress(MetamqError):
            master = _master_of(self._broker())
        living = [member for member in self.members if not member.ended]
        for is_master in (False, True):
            some = [member for member in living if (member.number == master) is is_master]
            for member in some:
                member.terminate()
            for member in some:
                member.end()

    def stop(self) -> None:
        """Ends all replicas, with SIGKILL if necessary. May be repeated."""
        for member in self.members:
            member.terminate()
        for member in self.members:
            member.stop()


def _master_of(broker: BrokerReplicas | None) -> int | None:
    if broker is None:
        return None
    return next((one.replica for one in broker.replicas if one.role == "master"), None)


def _succession(broker: BrokerReplicas) -> str:
    """Describes the successor of the master that has ended."""
    slaves = [one for one in broker.replicas if one.in_sync and one.role != "master"]
    ready = [one.replica for one in slaves if one.address is not None and _answers(one.address)]
    if broker.successor in ready:
        return f"Replica {broker.successor} takes over by itself."
    if ready:
        return f"To make a slave the master: metamq ha promote --broker {BROKER_ID} --slave {ready[0]}"
    return f"No slave takes over: {broker.no_successor or 'none that is in sync answers'}."


def _answers(address: str) -> bool:
    """Returns True if a process listens there: a killed replica stays registered until its session ends."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return False
    return True
