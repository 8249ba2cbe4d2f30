"""Workers that run beside a test, and stop at the end of a block: `metamq worker` as a process, or `run()` in a thread
or a task."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from metamq.client.settings import cluster_access
from metamq.errors import ClosedError, ConfigError, MetamqError, Timeout
from metamq.testing.broker_process import START_TIMEOUT_S, STOP_TIMEOUT_S, clean_environment

if TYPE_CHECKING:
    import metamq
    from metamq.client.consumer.consumer_api import ConsumerApi
    from metamq.client.model import Message
    from metamq.testing.clusters import Cluster

READY = '{"handler":'
"""The beginning of the line that a worker prints when it has joined its group."""
OUTPUT_S = 0.5
"""Seconds for the last output of a worker that has ended. It comes at once; what the worker has forked may go on."""


class WorkerProcess:
    """A `metamq worker` as a process. It ends with this process. Its output is that of this process."""

    def __init__(self, cluster: Cluster, arguments: Sequence[str]) -> None:
        security = {f"METAMQ_SECURITY_{name.upper()}": str(one) for name, one in asdict(cluster.security).items()}
        access = cluster_access(cluster.zookeeper, None, None, cluster.security)
        own = {"METAMQ_ZOOKEEPER": cluster.zookeeper, "METAMQ_ROOT": access.root, **security}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "metamq.cli", "worker", *arguments, "--with-parent", "--output=json"],
            env={**clean_environment(), **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C ends the tests, and they end their worker
        )
        self._said = threading.Event()
        self._has_joined = False
        self._output = threading.Thread(target=self._pass_on, name="metamq-worker-output", daemon=True)
        self._output.start()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line.startswith(READY):
                    self._has_joined = True
                    self._said.set()
                else:
                    sys.stdout.write(line)
        self._said.set()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until the worker has joined its group. Raises MetamqError if it ends, Timeout after `timeout_s`."""
        if not self._said.wait(timeout_s):
            raise Timeout("the start of a worker", timeout_s)
        if not self._has_joined:
            raise MetamqError(f"a worker ended with status {self.wait()} at its start", hint="Its log has the reason.")

    def stop(self) -> int:
        """Sends SIGTERM: the worker ends after the messages in progress. Returns its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Sends SIGKILL, which is like a crash."""
        self._process.kill()
        self.wait()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits for a worker that ends by itself, as by --idle-timeout. Returns its exit status. Raises Timeout."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Timeout("the end of a worker", timeout_s) from None
        self._output.join(OUTPUT_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return status


@contextlib.contextmanager
def worker(cluster: Cluster, arguments: str | Sequence[str]) -> Iterator[WorkerProcess]:
    """Runs `metamq worker` with these arguments beside a block, as a process in the present folder.

        with worker(cluster, "billing:bill --group billing --topic orders") as one: ...

    The block begins when the worker has joined its group. At its end the worker gets SIGTERM, and finishes the messages
    in progress. Raises MetamqError if it ends with an error; a kill() of the test is none. Raises Timeout.
    """
    given = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
    with contextlib.ExitStack() as stack:
        one = WorkerProcess(cluster, given)
        stack.callback(one.kill)
        one.wait_ready()
        try:
            yield one
        finally:
            status = one.stop()
        if status not in (0, -signal.SIGKILL):
            raise MetamqError(f"a worker ended with status {status}", hint="Its log has the reason.")


@contextlib.contextmanager
def running(consumer: metamq.Consumer[Any], listener: Callable[[Message[Any]], object], **run: Any) -> Iterator[None]:
    """Runs `consumer.run(listener, **run)` in a thread beside a block, and stops it at the block's end, after the
    messages in progress. The consumer stays open, but has stopped: for a further run() make another one.

    Raises the error of run() there; if the block has failed, too, from the error of the block. Raises ConfigError for a
    consumer that has stopped before."""
    _check_runs(consumer)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            consumer.run(listener, **run)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="metamq-running", daemon=True)
    thread.start()
    with _errors_of_run(errors):
        try:
            yield
        finally:
            with contextlib.suppress(ClosedError):
                consumer.stop()
            thread.join()


@contextlib.asynccontextmanager
async def aio_running(
    consumer: metamq.aio.Consumer[Any], listener: Callable[[Message[Any]], object], **run: Any
) -> AsyncIterator[None]:
    """Runs `consumer.run(listener, **run)` in a task beside a block; see running()."""
    _check_runs(consumer)
    errors: list[BaseException] = []
    task = asyncio.ensure_future(consumer.run(listener, **run))
    with _errors_of_run(errors):
        try:
            yield
        finally:
            with contextlib.suppress(ClosedError):
                consumer.stop()
            errors += [error for error in await asyncio.gather(task, return_exceptions=True) if error is not None]


def _check_runs(consumer: ConsumerApi[Any]) -> None:
    if consumer.stopped:
        raise ConfigError("the consumer has stopped, and runs no more", hint="Make another one for each run().")


@contextlib.contextmanager
def _errors_of_run(errors: Sequence[BaseException]) -> Iterator[None]:
    """Raises the error of run(), if there is one at the end of the block: it is the cause of most errors there."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if errors:
            raise errors[0] from error
        raise
    if errors:
        raise errors[0]
