"""One broker as a process: start, stop, kill, freeze."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from metamq.client.settings import cluster_access
from metamq.errors import MetamqError, Timeout
from metamq.security.config import SecurityConfig
from metamq.zk.server.embedded import freeze
from metamq.zk.server.ports import HeldPort

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
LOG_CHARACTERS = 2000
INSECURE = SecurityConfig()


class BrokerProcess:
    """One broker as a process of its own, on a port that stays the same over restarts. It ends with this process."""

    command: tuple[str, ...] = (sys.executable, "-m", "metamq.broker")
    popen: Callable[..., Any] = staticmethod(subprocess.Popen)

    def __init__(self, zookeeper: str, data: Path, broker_id: int = 0, **settings: object) -> None:
        """`settings` are the settings of metamq.broker.config.BrokerConfig."""
        self.broker_id = broker_id
        self.data = data
        self.port: int = 0
        self._held: HeldPort | None = None
        self.http_port: int = 0
        self.log_path: Path = data.with_name(f"{data.name}.log")
        self._zookeeper = zookeeper
        self.security = INSECURE
        """Its security settings. A change takes effect at the next start."""
        self.settings: dict[str, object] = {"disk_reserve_bytes": 64 * 1024 * 1024, "http_port": 0, **settings}
        self._process: subprocess.Popen[str] | None = None
        self.frozen: bool = False
        """True between freeze() and thaw()."""

    @property
    def replica(self) -> int:
        """The number of this replica within the broker id."""
        return int(str(self.settings.get("replica", 0)))

    def start(self, *, wait: bool = True, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the process, and waits until it serves, unless `wait` is False. Raises the errors of wait_ready()."""
        assert self._process is None
        # The system must not choose the port: while the broker is down, the system could give the port to a connection.
        if not self.port:
            self._held = HeldPort(str(self.settings.get("host", "127.0.0.1")))
            self.port = self._held.number
        self._begins()
        settings = {**self.settings, "id": self.broker_id, "data": self.data, "port": self.port}
        environment = {f"METAMQ_BROKER_{name.upper()}": str(value) for name, value in settings.items()}
        environment["METAMQ_ZOOKEEPER"] = self._zookeeper
        environment["METAMQ_ROOT"] = cluster_access(self._zookeeper, None, None, self.security).root
        environment |= {f"METAMQ_SECURITY_{name.upper()}": str(one) for name, one in asdict(self.security).items()}
        with self.log_path.open("a") as log:
            self._process = self.popen(
                [*self.command, "--with-parent"],
                env={**clean_environment(), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C signals the whole foreground group, but only the tests decide when their brokers end.
                start_new_session=True,
            )
        if wait:
            self.wait_ready(timeout_s)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until a started process serves. Raises MetamqError if it ends, and Timeout after `timeout_s`: then the
        process is killed. Both errors have the end of its log."""
        assert self._process is not None
        assert self._process.stdout is not None
        answer = select.poll()
        answer.register(self._process.stdout, select.POLLIN)
        if not answer.poll(timeout_s * 1000):
            self.kill()
            raise Timeout(f"the start of broker {self.broker_id}", timeout_s, hint=self._end_of_log())
        words = self._process.stdout.readline().split()
        if not words:
            status = self._process.wait()
            self._closed()
            raise MetamqError(
                f"broker {self.broker_id} ended with status {status} instead of serving", hint=self._end_of_log()
            )
        self.port, self.http_port = int(words[1]), int(words[2])

    def _end_of_log(self) -> str:
        return f"Its log {self.log_path} ends:\n{self.log_path.read_text()[-LOG_CHARACTERS:]}"

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def pid_or_none(self) -> int | None:
        """The process id; None if there is no process."""
        process = self._process
        return None if process is None else process.pid

    @property
    def running(self) -> bool:
        """True if the process exists, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """Sends SIGTERM, which stops the broker gracefully. Returns the exit status; 0 if it was not running."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, which is like a crash."""
        self._end(signal.SIGKILL)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits for a process that ends by itself. Returns its exit status."""
        assert self._process is not None
        status = self._process.wait(timeout_s)
        self._closed()
        return status

    def freeze(self) -> None:
        """Sends SIGSTOP. The process has stopped when this call returns."""
        freeze(self.pid)
        self.frozen = True

    def thaw(self) -> None:
        """Sends SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    def restart(self) -> None:
        """Stops the broker gracefully, and starts it on the same port and data."""
        self.stop()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        process.send_signal(number)
        if number == signal.SIGTERM:
            process.send_signal(signal.SIGCONT)
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._closed()
            raise MetamqError(f"broker {self.broker_id} did not stop within {STOP_TIMEOUT_S:g} s") from None
        self._closed()
        return status

    def _begins(self) -> None:
        """Is called before the process starts. Its port is known."""

    def _closed(self) -> None:
        assert self._process is not None
        self.frozen = False
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process = None


def clean_environment() -> dict[str, str]:
    """Returns our environment without settings for other brokers. The root stays: clients of the tests use it, too."""
    others = ("METAMQ_BROKER_", "METAMQ_SECURITY_", "METAMQ_CONFIG", "METAMQ_CONTEXT", "METAMQ_LOG_FORMAT")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}
