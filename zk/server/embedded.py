"""A real ZooKeeper server as a child process: for tests, the demo, `metamq up` and `metamq zookeeper`.

The server is Apache's own, started with a few jars on a small JVM. It must never outlive its parent. A parent killed
with -9 cannot clean up, so there is a pipe whose write end only the parent has:

    parent ──pipe──> sh: a watcher in the background reads the pipe, the shell itself becomes Java (exec)

When the parent ends for any reason, the kernel closes the pipe, the watcher's `read` fails, and the watcher kills Java.
An orderly stop first writes a line into the pipe. This ends the watcher before Java's process id can be reused.
PR_SET_PDEATHSIG is not used: it exists on Linux only, needs code between fork and exec, and fires when the *thread*
that started the child ends, not the process.

The port is chosen below the kernel's range of ephemeral ports. While the server is down, a client that reconnects again
and again could otherwise get that very port as its own, connect to itself, and block the port for the server.
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
from typing import IO, TYPE_CHECKING, Self

from metamq.errors import ConfigError, MetamqError, Timeout
from metamq.private_files import make_folder
from metamq.words import count, size
from metamq.zk.server.jars import find_jars
from metamq.zk.server.java import find_java
from metamq.zk.server.ports import HeldPort, is_free
from metamq.zk.server.server_log import ran_out_of_memory, what_went_wrong
from metamq.zk.server.server_tls import ServerTls, client_port

if TYPE_CHECKING:
    from metamq.security.config import SecurityConfig
    from metamq.zk.server.ensemble import Ensemble

MIN_SESSION_TIMEOUT_MS = 1_000
MAX_SESSION_TIMEOUT_MS = 60_000

MEMORY_BYTES = 512 << 20
"""Size of Java's heap, which has every node. Memory is taken as it is needed: an empty server takes a tenth of it."""
MEMORY_BYTES_MIN, MEMORY_BYTES_MAX = 32 << 20, 1 << 40
MEMORY_VARIABLE = "METAMQ_ZOOKEEPER_MEMORY"
START_TIMEOUT_S = 600.0
"""Seconds. Much data on a busy machine takes minutes; a server that cannot start ends by itself."""

log = logging.getLogger("metamq.zk")

_MAIN_CLASS = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
CLIENTS_OF_A_HOST_MAX = 4000
"""Sessions of one address. ZooKeeper's default of 60 is too low if all programs run on one machine. Without a limit, a
program that keeps opening sessions takes all descriptors of the server."""
TICK_MS = 100
"""ZooKeeper ends a session up to one tick late: which delays a failover. Its own default is 2 s."""
_WATCHED = 'umask g-w,o=; exec 3<&0; (read _ <&3 || kill -9 $$) & exec "$@" </dev/null 3<&-'
_PORT_ATTEMPTS = 5
_PROBE_INTERVAL_S, _PROBE_INTERVAL_S_MAX = 0.01, 0.5
_WARN_EVERY_S = 10.0
# A server that is starting accepts connections that it never answers: so the probe asks again soon.
_ANSWER_S_MIN, _ANSWER_S_MAX = 0.1, 1.0
_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}

_running: weakref.WeakSet[EmbeddedZooKeeper] = weakref.WeakSet()


class EmbeddedZooKeeper:
    """One ZooKeeper server in its own process, which ends with this one.

    `data_dir` None means a temporary folder, which `stop` removes; a given folder is kept, and has the log of the
    server, `zookeeper.log`. `port` 0 chooses a free one. `host` is the address that it listens on. `check` is called
    often during a start; an error from it ends the start. `memory_bytes` limits Java's heap: a server that needs more
    ends. In an `ensemble`, start() waits without a limit until enough other servers run. With `security` it speaks only
    TLS, also to the other servers. The object is a context manager. All methods except start() block for a few seconds
    at most; one thread at a time may call them.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
        ensemble: Ensemble | None = None,
        security: SecurityConfig | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self.port: int = port
        self._choose_port = port == 0
        self._held: HeldPort | None = None
        if not MEMORY_BYTES_MIN <= memory_bytes <= MEMORY_BYTES_MAX:
            limits = f"{size(MEMORY_BYTES_MIN)} to {size(MEMORY_BYTES_MAX)}"
            raise ConfigError(f"ZooKeeper's memory must be {limits}, not {memory_bytes!r} bytes")
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._ensemble = ensemble
        is_secure = security is not None and security.is_on and security.zookeeper_tls
        self._tls = ServerTls(security) if security is not None and is_secure else None
        self._check = check
        self._given_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._data_dir: Path | None = None
        self._lock: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def address(self) -> str:
        """The address for clients on this machine, "127.0.0.1:2181"; known after the start."""
        host = self._client_host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of the server; None if it does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def data_dir(self) -> Path | None:
        """The folder with the data and the log of the server; None before the first start."""
        return self._data_dir

    @property
    def log_path(self) -> Path:
        """The server's log, which continues over restarts. Only after a start."""
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
        """Starts the server and waits until it serves; does nothing if it already runs.

        Raises ConfigError if the port or the data folder is taken, or if Java or the jars are missing: the hint names
        every way to get them. Also raises it if the server gives up, with the last lines of its log. Raises MetamqError
        if it needs more memory than it may have; Timeout if a single server does not serve within `start_timeout_s`.
        """
        if self._process is not None:
            return self
        java, jars = find_java(), find_jars(secure=self._tls is not None)
        folder = self._open_data_dir()
        try:
            self._note_number(folder)
            self._start_server(java, jars, folder)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and removes temporary data. May be repeated, even if the server has already ended."""
        try:
            # Temporary data needs no orderly end.
            self._end(signal.SIGTERM if self._given_dir is not None else signal.SIGKILL)
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None
            if self._given_dir is None and self._data_dir is not None:
                shutil.rmtree(self._data_dir, ignore_errors=True)
                self._data_dir = None

    def check_running(self) -> None:
        """Raises MetamqError, with the reason, if the server has ended by itself since its start."""
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            self._check_memory()
            raise MetamqError(f"ZooKeeper {how_it_ended(status)}{self._last_words()}", hint=self._log_hint())

    def _check_memory(self) -> None:
        """Raises MetamqError if the server ended because it ran out of memory."""
        if ran_out_of_memory(self.log_path, self._log_start):
            more = f"{MEMORY_VARIABLE}={self._memory_bytes * 2 >> 20}MiB"
            raise MetamqError(
                f"ZooKeeper ended: its data needs more memory than its {size(self._memory_bytes)}",
                hint=f"Start it with more, such as {more}: `metamq zookeeper --memory`, `metamq up "
                f"--zookeeper-memory`. Its data is kept. {self._log_hint()}".rstrip(),
            )

    def _last_words(self) -> str:
        said = what_went_wrong(self.log_path, self._log_start)
        return f": {said}" if said else ""

    def _log_hint(self) -> str:
        # A temporary folder is about to be removed.
        return f"Its log is {self.log_path}." if self._given_dir is not None else ""

    def kill(self) -> None:
        """Kills the server with SIGKILL, like a crash; port and data are kept for `restart`."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kills the server if it runs, and starts it again on the same port and data."""
        self.kill()
        self._choose_port = False
        self.start()

    def freeze(self) -> None:
        """Stops the server with SIGSTOP: on return connections stay open and get no answers, until `thaw`."""
        freeze(self._child().pid)

    def thaw(self) -> None:
        """Continues the server with SIGCONT, after `freeze`."""
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

    def _note_number(self, folder: Path) -> None:
        """Notes the number of this server in its folder. Raises ConfigError if the folder is another server's.

        A single server on the folder of an ensemble's server would write changes that the others lack. The ensemble
        could then choose it as the leader, and the others would give up their committed changes. And servers with
        empty folders could form an ensemble without a server that has the data of a single one.
        """
        path = folder / "data" / "myid"
        number = path.read_text(errors="replace").strip() if path.exists() else ""
        wanted = str(self._ensemble.number) if self._ensemble is not None else ""
        if number and number != wanted:
            raise ConfigError(
                f"{folder} is the data folder of server {number} of an ensemble",
                hint=f"Give its --ensemble and --id {number}, or another folder. To run it as a single server, stop "
                f"the others permanently, and remove {path}.",
            )
        if wanted and not number and (folder / "data" / "version-2").exists():
            raise ConfigError(
                f"{folder} has the data of a single ZooKeeper server",
                hint="Copy its data/version-2 into the folders of all servers of the ensemble first. Then write the "
                f"number of each server into its data/myid: here {wanted} into {path}.",
            )
        if wanted:
            path.write_text(f"{wanted}\n")

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
        """Starts the process. Returns True if it serves; False if it ended instead."""
        if self._tls is not None:
            self._tls.write(folder)
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
                # Ctrl-C goes to the whole foreground group, but the parent decides when its server ends.
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
            if waited_s > self._start_timeout_s and self._ensemble is None:
                what = f"the start of ZooKeeper in {folder}{self._last_words()}"
                raise Timeout(what, self._start_timeout_s, hint=self._log_hint())
            if time.monotonic() - said >= _WARN_EVERY_S:
                said = time.monotonic()
                what = f"ZooKeeper (process {self._process.pid}) does not serve yet after {waited_s:.0f} s"
                servers = (
                    f". {count(self._ensemble.quorum, 'server')} must run and reach each other"
                    if self._ensemble
                    else ""
                )
                log.warning("%s: waiting for it%s. Its log is %s", what, servers, self.log_path)
            answer_s = min(max(waited_s / 4, _ANSWER_S_MIN), _ANSWER_S_MAX)
            time.sleep(min(max(waited_s / 100, _PROBE_INTERVAL_S), _PROBE_INTERVAL_S_MAX))
        return True

    def _command(self, java: Path, jars: list[Path], config: Path) -> list[str]:
        # Without memory one thread fails after another, and the process would neither serve nor end.
        memory = ["-Xms16m", f"-Xmx{self._memory_bytes >> 10}k", "-XX:+ExitOnOutOfMemoryError"]
        flags = [*memory, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
        # The default is 64 MB for each log file.
        properties = ["-Dzookeeper.preAllocSize=1024", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        if self._given_dir is None:
            properties.append("-Dzookeeper.forceSync=no")
        class_path = os.pathsep.join(str(jar) for jar in jars)
        return [str(java), *flags, *properties, "-cp", class_path, _MAIN_CLASS, str(config)]

    def _config(self, folder: Path) -> str:
        settings: dict[str, object] = {
            "tickTime": TICK_MS,
            "dataDir": folder / "data",
            **client_port(self.port, self.host or "0.0.0.0", is_secure=self._tls is not None),
            "minSessionTimeout": MIN_SESSION_TIMEOUT_MS,
            "maxSessionTimeout": MAX_SESSION_TIMEOUT_MS,
            "maxClientCnxns": CLIENTS_OF_A_HOST_MAX,
            "admin.enableServer": "false",
            "autopurge.snapRetainCount": 3,
            "autopurge.purgeInterval": 1,
            "4lw.commands.whitelist": "conf,envi,srvr",
        }
        if self._ensemble is not None:
            settings |= self._ensemble.settings(TICK_MS)
            settings["quorumListenOnAllIPs"] = str(self.host in ("", "0.0.0.0", "::")).lower()
        if self._tls is not None:
            settings |= self._tls.settings(folder, with_quorum=self._ensemble is not None)
        return "".join(f"{key}={value}\n" for key, value in settings.items())

    def _serves(self, folder: Path, timeout_s: float) -> bool:
        """Asks for the configuration: its data folder distinguishes this server from another one at this port."""
        try:
            with self._connected(timeout_s) as connection:
                connection.sendall(b"conf")
                answer = b""
                while chunk := connection.recv(4096):
                    answer += chunk
        except OSError:
            return False
        return f"dataDir={folder / 'data'}/".encode() in answer

    def _connected(self, timeout_s: float) -> socket.socket:
        connection = socket.create_connection((self._client_host, self.port), timeout=timeout_s)
        return connection if self._tls is None else self._tls.wrapped(connection)

    def renew(self) -> None:
        """Gives the server its certificate again if the files have changed. It uses it for new connections."""
        if self._tls is not None and self._data_dir is not None:
            try:
                self._tls.write(self._data_dir)
            except OSError as error:
                log.error("ZooKeeper keeps its former certificate: %s", error)

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
        """Closes a forked copy of the pipe's write end, which would keep the server alive after its parent."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            # Popen warns about a process that still runs, although it is not a child of the forked process.
            self._process.returncode = 0
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._given_dir = self._given_dir or self._data_dir


def how_it_ended(status: int) -> str:
    """Describes the end of a process, by its `returncode`."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def freeze(pid: int) -> None:
    """Sends SIGSTOP to a child, which has stopped on return. Raises ProcessLookupError."""
    os.kill(pid, signal.SIGSTOP)
    if sys.platform == "linux":  # elsewhere it continues for a moment
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _port_is_free(host: str, port: int) -> bool:
    try:
        return is_free(host, port)
    except OSError as error:
        raise ConfigError(f"ZooKeeper cannot listen on {host}:{port}: {error}", hint="Choose another one.") from error


def _port_taken(host: str, port: int) -> ConfigError:
    return ConfigError(
        f"port {port} of {host} is taken, so ZooKeeper cannot listen there",
        hint="Choose another port, or stop the program there: it may be a ZooKeeper that you can use as it is.",
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
