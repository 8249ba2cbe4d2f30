"""A process without a descriptor left: connections wait, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metamq.broker.front_door.acceptor import DESCRIPTORS_LEFT
from metamq.broker.log.disk.files import FileCache
from metamq.testing import BrokerProcess, Cluster
from metamq.wire.commands import Command, Hello
from metamq.wire.frames import encode_frame
from tests.one_zookeeper import cluster
from tests.parts import http_get, wait_until

HELLO = b"".join(encode_frame(1, Command.HELLO, 0, 0, Hello(1, 1, "test")))

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors by /proc")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(folder=tmp_path) as parts:
        yield parts


def leave_room(broker: BrokerProcess, count: int) -> None:
    """Lets the process open so many descriptors more."""
    pid = broker.pid
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    number, free = 0, 0
    while free < count or number in used:
        free += number not in used
        number += 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


def greeted(client: socket.socket, limit_s: float) -> bool:
    """Whether the broker answers a HELLO within the time; False too when it hangs up."""
    client.settimeout(limit_s)
    with contextlib.suppress(OSError):
        return bool(client.recv(100))
    return False


def test_connections_wait_until_there_are_descriptors_again(running: Cluster) -> None:
    broker, room = running.broker, 8
    with running.admin() as admin:
        admin.create_topic("t", partitions=3, flush="ack", segment_bytes=20_000)
    with running.producer() as producer, contextlib.ExitStack() as stack:
        for partition in range(3):
            producer.send("t", b"before", partition=f"0-{partition}").result(60)
        leave_room(broker, DESCRIPTORS_LEFT + room)
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", broker.port))) for _ in range(40)]
        for client in clients:
            client.sendall(HELLO)
        said = "no connection is accepted at present"
        wait_until(lambda: said in broker.log_path.read_text())
        process = psutil.Process(broker.pid)
        before = process.cpu_times()
        for number in range(60):  # segments are rolled, files opened, flushes duplicate descriptors
            producer.send("t", b"%d" % number + bytes(1000), partition=f"0-{number % 3}").result(60)
        after = process.cpu_times()
        print(f"60 acknowledged messages: {after.user + after.system - before.user - before.system:.2f} s of the CPU")
        assert after.user + after.system - before.user - before.system < 2
        served = [client for client in clients if greeted(client, 0.01)]
        assert 0 < len(served) <= 2 * room, "what was open for a moment when it was counted makes room as well"
        assert broker.running
        for client in served:
            client.close()
        late = [client for client in clients if client not in served]
        assert greeted(late[0], 60), "it waited, and was not turned away"
        leave_room(broker, 4)  # less than connections leave, and than a flush takes
        for number in range(60):
            producer.send("t", b"%d" % number + bytes(1000), partition=f"0-{number % 3}").result(60)
        leave_room(broker, 200)
        for client in late:
            client.close()
        wait_until(lambda: "connections are accepted again" in broker.log_path.read_text())
        wait_until(lambda: http_get(broker.http_port, "/readyz")[0] == 200)
        with running.producer() as other:
            other.send("t", b"after").result(60)
        assert len(re.findall(said, broker.log_path.read_text())) <= 4, "not at each attempt"
    assert broker.stop() == 0


def test_files_of_the_log_make_room_for_one_another(tmp_path: Path) -> None:
    """Whatever has taken the descriptors: the cache gives some of its own back, and its limit is what it was."""
    paths = [str(tmp_path / str(n)) for n in range(6)]
    files = FileCache(100)
    for path in paths:
        files.create(path)
        files.write(path, path.encode(), 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = []
    try:
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                holes.append(os.open("/dev/null", os.O_RDONLY))
        other = str(tmp_path / "other")
        files.create(other)
        fd = files.duplicate(paths[0])
        files.replace(str(tmp_path / "replaced"), b"x")
        assert 0 < files.open_count < 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for hole in holes:
            os.close(hole)
    assert os.pread(fd, 100, 0) == paths[0].encode()
    os.close(fd)
    for path in paths:
        assert os.pread(files.descriptor(path), 100, 0) == path.encode()
    files.close()
