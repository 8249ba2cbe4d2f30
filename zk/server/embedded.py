"""A real ZooKeeper server as a child process: for tests, the demo and `metamq up`.

The server is Apache's own, started with five jars on a small JVM. It must never outlive its parent, not even a
parent killed with -9, which cannot clean up. The means is a pipe whose write end only the parent has:

    parent ──pipe──> sh: a watcher in the background reads the pipe, the shell itself becomes Java (exec)

When the parent dies in whatever way, the kernel closes the pipe, the watcher's `read` fails, and it kills Java.
An orderly stop writes a line into the pipe first, which sends the watcher away before Java's process id can be
used again. PR_SET_PDEATHSIG is not used: it is Linux only, needs code between fork and exec, and fires when the
*thread* that started the child ends, not the process.

The port is chosen below the kernel's range of ephemeral ports. Within it, a client that tries again and again
while the server is down may be given that very port as its own, connect to itself, and keep the server out.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from metamq.errors import ConfigError, MetamqError, Timeout
from metamq.private_files import make_folder
from metamq.words import size
from metamq.zk.server.jars import find_jars
from metamq.zk.server.java import find_java
from metamq.zk.server.ports import HeldPort, is_free
from metamq.zk.server.server_log import ran_out_of_memory, what_went_wrong

MIN_SESSION_TIMEOUT_MS = 1_000
MAX_SESSION_TIMEOUT_MS = 60_000

MEMORY_BYTES = 512 << 20
"""Of Java's heap, which holds every node. It is taken as it is needed: an empty server has a tenth of it."""
MEMORY_BYTES_MIN, MEMORY_BYTES_MAX = 32 << 20, 1 << 40
MEMORY_VARIABLE = "METAMQ_ZOOKEEPER_MEMORY"
START_TIMEOUT_S = 600.0
"""Much data on a busy machine takes minutes; a server that cannot start ends by itself."""

log = logging.getLogger("metamq.zk")

_MAIN_CLASS = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
CLIENTS_OF_A_HOST_MAX = 4000
"""Sessions of one address. ZooKeeper's own 60 are few where all programs run on one machine; without a limit one that
opens sessions for ever takes all descriptors of the server."""
_WATCHED = 'umask g-w,o=; exec 3<&0; (read _ <&3 || kill -9 $$) & exec "$@" </dev/null 3<&-'
_PORT_ATTEMPTS = 5
_PROBE_INTERVAL_S = 0.01
_SAYS_IT_WAITS_S = 10.0
# A server that is starting takes connections which it then never answers: better to ask again than to wait.
_ANSWER_S_MIN, _ANSWER_S_MAX = 0.1, 1.0
_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}

_running: weakref.WeakSet[EmbeddedZooKeeper] = weakref.WeakSet()


class EmbeddedZooKeeper:
    """One ZooKeeper server, in a process of its own, that dies with this one.

    `data_dir` None is a temporary folder, removed by `stop`; a given folder is kept and holds the log of the
    server, `zookeeper.log`. `port` 0 chooses a free one. `host` is what it listens on. `check` is called often during
    a start; what it raises ends that. `memory_bytes` bounds Java's heap: a server that needs more ends. A context
    manager; all methods block, for under a second as a rule, and are to be called by one thread at a time.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        tick_ms: int = 500,
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self.port: int = port
        self._choose_port = port == 0
        self._held: HeldPort | None = None
        self._tick_ms = tick_ms
        if not MEMORY_BYTES_MIN <= memory_bytes <= MEMORY_BYTES_MAX:
            limits = f"{size(MEMORY_BYTES_MIN)} to {size(MEMORY_BYTES_MAX)}"
            raise ConfigError(f"ZooKeeper's memory must be {limits}, not {memory_bytes!r} bytes")
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._check = check
        self._given_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._data_dir: Path | None = None
        self._lock: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def address(self) -> str:
        """What a client on this machine connects to, "127.0.0.1:2181"; known once started."""
        host = self._client_host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of the server; None when it does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def data_dir(self) -> Path | None:
        """The folder with the data and the log of the server; None before the first start."""
        return self._data_dir

    @property
    def log_path(self) -> Path:
        """The server's log, which goes on over restarts. For a server that was started."""
        assert self._data_dir is not None
        return self._data_dir / "zookeeper.log"

    @property
    def _client_host(self) -> str:
        return _LOOPBACK_OF.get(self.host, self.host)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the server and wait until it serves; does nothing when it runs already.

        Raises ConfigError when the port or the data folder is taken, when there is no Java or no jars (the
        hint names every way to get them), or when the server gives up (with the last lines of its log);
        MetamqError when it needs more memory than it may have; Timeout when it does not serve within `start_timeout_s`.
        """
        if self._process is not None:
            return self
        java, jars = find_java(), find_jars()
        folder = self._open_data_dir()
        try:
            self._start_server(java, jars, folder)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and remove temporary data. May be repeated; does not mind a server that is gone already."""
        try:
            # What is thrown away needs no orderly end.
            self._end(signal.SIGTERM if self._given_dir is not None else signal.SIGKILL)
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None
            if self._given_dir is None and self._data_dir is not None:
                shutil.rmtree(self._data_dir, ignore_errors=True)
                self._data_dir = None

    def check_running(self) -> None:
        """Raise MetamqError, saying how, when the server has ended by itself since it was started."""
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            self._check_memory()
            raise MetamqError(f"ZooKeeper {how_it_ended(status)}{self._last_words()}", hint=self._log_hint())

    def _check_memory(self) -> None:
        """Raise MetamqError when the server, which has ended, ran out of memory."""
        if ran_out_of_memory(self.log_path, self._log_start):
            raise MetamqError(
                f"ZooKeeper ended: what it holds needs more memory than its {size(self._memory_bytes)}",
                hint=f"Start it with more, such as {MEMORY_VARIABLE}={_twice(self._memory_bytes)}: `metamq zookeeper "
                f"--memory`, `metamq up --zookeeper-memory`. Its data is kept. {self._log_hint()}".rstrip(),
            )

    def _last_words(self) -> str:
        said = what_went_wrong(self.log_path, self._log_start)
        return f": {said}" if said else ""

    def _log_hint(self) -> str:
        # A temporary folder is about to be removed.
        return f"Its log is {self.log_path}." if self._given_dir is not None else ""

    def kill(self) -> None:
        """SIGKILL, as a crash would; port and data are kept for `restart`."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill the server if it runs, and start it again on the same port and the same data."""
        self.kill()
        self._choose_port = False
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered once this returns, until `thaw`."""
        freeze(self._child().pid)

    def thaw(self) -> None:
        """SIGCONT, after `freeze`."""
        os.kill(self._child().pid, signal.SIGCONT)

    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ConfigError(f"the embedded ZooKeeper at port {self.port} does not run", hint="start() it first.")
        return self._process

    def _open_data_dir(self) -> Path:
        if self._data_dir is None:
            self._data_dir = self._given_dir or Path(tempfile.mkdtemp(prefix="metamq-zookeeper-"))
        folder = self._data_dir
        try:
            make_folder(folder / "data")
            if self._lock is None:
                self._lock = _locked(folder / "lock")
        except OSError as error:
            raise ConfigError(
                f"ZooKeeper's data folder {folder} cannot be used: {error}", hint="Choose another data folder."
            ) from error
        return folder

    def _start_server(self, java: Path, jars: list[Path], folder: Path) -> None:
        for _ in range(_PORT_ATTEMPTS if self._choose_port else 1):
            if self._choose_port:
                self._held = HeldPort(self.host)
                self.port = self._held.number
            elif not _port_is_free(self.host, self.port):
                raise _port_taken(self.host, self.port)
            if self._launch(java, jars, folder):
                return
            if _port_is_free(self.host, self.port):
                raise ConfigError(f"ZooKeeper did not start in {folder}{self._last_words()}", hint=self._log_hint())
        raise _port_taken(self.host, self.port)

    def _launch(self, java: Path, jars: list[Path], folder: Path) -> bool:
        """Whether it serves; False when the process ended instead."""
        config = folder / "zoo.cfg"
        config.write_text(self._config(folder))
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "zookeeper", *self._command(java, jars, config)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                bufsize=0,
                # Ctrl-C goes to the whole foreground group: the parent decides when its server ends.
                start_new_session=True,
            )
        _running.add(self)
        started = said = time.monotonic()
        answer_s = _ANSWER_S_MIN
        while not self._serves(folder, answer_s):
            self._check()
            if self._process.poll() is not None:
                self._end(signal.SIGKILL)
                self._check_memory()
                return False
            waited_s = time.monotonic() - started
            if waited_s > self._start_timeout_s:
                what = f"the start of ZooKeeper in {folder}{self._last_words()}"
                raise Timeout(what, self._start_timeout_s, hint=self._log_hint())
            if time.monotonic() - said >= _SAYS_IT_WAITS_S:
                said = time.monotonic()
                what = f"ZooKeeper (process {self._process.pid}) does not serve yet after {waited_s:.0f} s"
                log.warning("%s: waiting for it. Its log is %s", what, self.log_path)
            answer_s = min(max(waited_s / 4, _ANSWER_S_MIN), _ANSWER_S_MAX)
            time.sleep(_PROBE_INTERVAL_S)
        return True

    def _command(self, java: Path, jars: list[Path], config: Path) -> list[str]:
        # Out of memory, one thread fails after another, and what is left would serve nobody without ending.
        memory = ["-Xms16m", f"-Xmx{self._memory_bytes >> 10}k", "-XX:+ExitOnOutOfMemoryError"]
        flags = [*memory, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
        # The default is 64 MB for each log file.
        properties = ["-Dzookeeper.preAllocSize=1024", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        if self._given_dir is None:
            properties.append("-Dzookeeper.forceSync=no")
        class_path = os.pathsep.join(str(jar) for jar in jars)
        return [str(java), *flags, *properties, "-cp", class_path, _MAIN_CLASS, str(config)]

    def _config(self, folder: Path) -> str:
        settings = {
            "tickTime": self._tick_ms,
            "dataDir": folder / "data",
            "clientPort": self.port,
            "clientPortAddress": self.host or "0.0.0.0",
            "minSessionTimeout": MIN_SESSION_TIMEOUT_MS,
            "maxSessionTimeout": MAX_SESSION_TIMEOUT_MS,
            "maxClientCnxns": CLIENTS_OF_A_HOST_MAX,
            "admin.enableServer": "false",
            "autopurge.snapRetainCount": 3,
            "autopurge.purgeInterval": 1,
            "4lw.commands.whitelist": "conf",
        }
        return "".join(f"{key}={value}\n" for key, value in settings.items())

    def _serves(self, folder: Path, timeout_s: float) -> bool:
        """Asks for the configuration: the data folder in it tells our server from another at this port."""
        try:
            with socket.create_connection((self._client_host, self.port), timeout=timeout_s) as connection:
                connection.sendall(b"conf")
                answer = b""
                while chunk := connection.recv(4096):
                    answer += chunk
        except OSError:
            return False
        return f"dataDir={folder / 'data'}/".encode() in answer

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _running.discard(self)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b"\n")
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout=3.0)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also after a second Ctrl-C
            process.kill()
            process.wait()
            process.stdin.close()

    def _forget_in_child(self) -> None:
        """A fork has a copy of the pipe's write end, which would keep the server alive after its parent."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            # Popen warns of a process that still runs; to this one it is not even a child.
            self._process.returncode = 0
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._given_dir = self._given_dir or self._data_dir


def how_it_ended(status: int) -> str:
    """The end of a process in words, by its `returncode`."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _twice(memory_bytes: int) -> str:
    return f"{memory_bytes * 2 >> 20}MiB"


def freeze(pid: int) -> None:
    """SIGSTOP to a child, which has stopped once this returns. Raises ProcessLookupError."""
    os.kill(pid, signal.SIGSTOP)
    if sys.platform == "linux":  # elsewhere it runs on for a moment
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _port_is_free(host: str, port: int) -> bool:
    try:
        return is_free(host, port)
    except OSError as error:
        raise ConfigError(f"ZooKeeper cannot listen on {host}:{port}: {error}", hint="Choose another one.") from error


def _port_taken(host: str, port: int) -> ConfigError:
    return ConfigError(
        f"port {port} of {host} is taken, ZooKeeper cannot listen there",
        hint="Choose another port, or end what listens there: it may be a ZooKeeper that can be used as it is.",
    )


def _locked(path: Path) -> IO[bytes]:
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"another ZooKeeper uses the data folder {path.parent}", hint="Use that one, or another folder."
        ) from error
    except BaseException:
        file.close()
        raise
    return file


def _forget_all_in_child() -> None:
    for server in list(_running):
        server._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
