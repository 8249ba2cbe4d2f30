"""docs/runbook.md: every command runs as printed, on a broker to which happened what its section's title says."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from metamq import Admin, Consumer, Producer
from metamq.errors import MetamqError
from metamq.testing import BrokerProcess
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ports import free_port
from tests.parts import read_to_end, wait_until

pytestmark = pytest.mark.timeout(600)

RUNBOOK = Path(__file__).parent.parent / "docs" / "runbook.md"
TOPIC = "orders"
SESSION = "session_timeout_ms = 2000\n"
"""Added to the settings as printed: how long a new folder waits for the session of a lost one."""
IS_UP = " is up at "


class Pair:
    """Broker 0 and its replicas, as the commands of the runbook start and stop them."""

    def __init__(self, server: EmbeddedZooKeeper, folder: Path) -> None:
        self.server = server
        self.zookeeper = server.address
        self.folder = folder
        self.admin = Admin(self.zookeeper)
        self.sent: list[bytes] = []

    def settings(self, number: int) -> str:
        """The settings as printed, at this test's own ports."""
        (printed,) = re.findall(r"^```toml\n(.*?)^```$", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)
        changes = {
            "127.0.0.1:2181": self.zookeeper,
            "replica = 0": f"replica = {number}",
            "replica-0": f"replica-{number}",
            "8123": str(free_port()),
            "8120": str(free_port()),
        }
        for before, after in changes.items():
            assert printed.count(before) == 1, before
            printed = printed.replace(before, after)
        return str(printed + SESSION)

    def run(self, commands: str) -> None:
        """Runs a block; fails with all that it said when one of its commands fails."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "METAMQ_ZOOKEEPER": self.zookeeper}
        # To a file: brokers that it starts go on, and would hold a pipe open.
        with (self.folder / "said.txt").open("w+") as said:
            done = subprocess.run(
                ["bash", "-e", "-c", commands], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said, start_new_session=True, timeout=280,
            )  # fmt: skip
            said.seek(0)
            text = said.read()
        assert done.returncode == 0, f"{commands}\n{text}"

    def start(self, number: int) -> None:
        said = self.folder / f"replica-{number}.log"
        said.touch()
        before = said.read_text().count(IS_UP)
        self.run(f"metamq broker --config replica-{number}.toml >>replica-{number}.log 2>&1 &")
        # That of a killed one is registered still, for as long as its session lasts.
        wait_until(lambda: said.read_text().count(IS_UP) > before, what=f"replica {number} up")
        self.wait_registered(number)

    def kill(self, number: int) -> None:
        lock = self.folder / f"replica-{number}" / "lock"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(lock.read_text()), signal.SIGKILL)
            subprocess.run(["flock", lock, "true"], check=True)

    def end(self) -> None:
        """Kills whatever its commands have started and left."""
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(self.folder):
                process.kill()
                process.wait(60)

    def lose_disk(self, number: int) -> None:
        self.kill(number)
        shutil.rmtree(self.folder / f"replica-{number}")

    def damage(self, number: int, partitions: str = "[01]") -> None:
        """Changes a byte in the first batch of a partition, under a broker that is not there."""
        logs = (self.folder / f"replica-{number}").glob(f"topics/[!~]*/{partitions}/*.log")
        path = next(one for one in logs if one.stat().st_size)
        with path.open("r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(bytes([first[0] ^ 0xFF]))

    def lose_zookeeper(self) -> None:
        """Another one, with nothing in it, has the address."""
        self.server.stop()
        self.server = EmbeddedZooKeeper(self.folder / "empty-zookeeper", self.server.port).start()

    def wait_gone(self, number: int) -> None:
        wait_until(lambda: number not in self.roles(), what=f"the end of replica {number}'s session")

    def another_boot(self, number: int) -> None:
        meta = self.folder / f"replica-{number}" / "meta.json"
        meta.write_text(re.sub(r'"boot_id": "[^"]*"', '"boot_id": "another"', meta.read_text()))

    def roles(self) -> dict[int, str]:
        """Of the replicas that are registered."""
        broker = self.admin.replicas().get(0)
        return {one.replica: one.role for one in broker.replicas if one.address} if broker is not None else {}

    def wait_registered(self, number: int) -> None:
        wait_until(lambda: number in self.roles(), what=f"replica {number} registered")

    def send(self) -> None:
        values = [b"%d" % number for number in range(len(self.sent), len(self.sent) + 50)]
        with Producer[bytes](self.zookeeper) as producer:
            producer.send_many(TOPIC, values).result(60)
        self.sent += values

    def read(self) -> list[bytes]:
        with Consumer[bytes](self.zookeeper, topics=[TOPIC], start="earliest", idle_timeout_s=0.5) as consumer:
            return [message.value for message in read_to_end(consumer)]

    def in_sync(self) -> list[int]:
        return [one.replica for one in self.admin.replicas()[0].replicas if one.in_sync]

    def wait_in_sync(self) -> None:
        wait_until(self._is_in_sync, what="both replicas in sync")

    def _is_in_sync(self) -> bool:
        replicas = self.admin.replicas()[0].replicas
        print(replicas)
        return [one.holds_all for one in replicas] == [True, True]

    def is_taken_back(self) -> bool:
        """Whether both replicas are there, and wait for a person."""
        with contextlib.suppress(MetamqError):
            return len(self.roles()) == 2 and bool(self.admin.replicas()[0].taken_back)
        return False

    def restore(self) -> None:
        """Both replicas run, in sync; 0 is the master."""
        for number in (0, 1):
            if number not in self.roles():
                self.start(number)
        self.wait_in_sync()
        if self.roles().get(1) == "master":
            self.admin.promote(0, 0)
            self.wait_in_sync()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("runbook")
    with EmbeddedZooKeeper(folder / "zookeeper") as server:
        pair = Pair(server, folder)
        try:
            for number in (0, 1):
                (folder / f"replica-{number}.toml").write_text(pair.settings(number))
                pair.start(number)
            pair.admin.create_topic(TOPIC, partitions=2, replication="sync", flush="ack")
            yield pair
        finally:
            pair.admin.close()
            pair.end()
            pair.server.stop()


@pytest.fixture
def pair(running: Pair) -> Pair:
    running.restore()
    running.send()
    return running


def sections() -> dict[str, list[str]]:
    """The blocks of commands by the title that they stand under."""
    found = {}
    for part in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE):
        blocks = re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        found[part.splitlines()[0]] = blocks
    return found


def nothing(_pair: Pair) -> None:
    return


def the_master_dies(pair: Pair) -> None:
    pair.kill(0)


DAMAGED = " is damaged at byte "


def the_slaves_log_is_damaged(pair: Pair) -> None:
    pair.kill(1)
    pair.damage(1)


def the_masters_log_is_damaged(pair: Pair) -> None:
    pair.kill(0)
    pair.damage(0)
    start_until_noticed(pair)
    pair.wait_in_sync()


def start_until_noticed(pair: Pair) -> None:
    """The damage is noticed at the start, or by the scrub."""
    said = pair.folder / "replica-0.log"
    before = said.read_text().count(DAMAGED)
    pair.start(0)
    wait_until(lambda: said.read_text().count(DAMAGED) > before, what="the damage noticed")


def a_log_is_damaged_while_the_slave_is_away(pair: Pair) -> None:
    """What the section gives up does not count as sent."""
    pair.kill(1)
    wait_until(lambda: len(pair.in_sync()) == 1, what="the slave out of the set")
    pair.send()
    with Consumer[bytes](pair.zookeeper, topics=[TOPIC], start="earliest", idle_timeout_s=0.5) as consumer:
        messages = read_to_end(consumer)
    assert sorted(message.value for message in messages) == sorted(pair.sent)
    pair.sent = [message.value for message in messages if message.partition != "0-1"]
    assert 0 < len(pair.sent) < len(messages)
    pair.kill(0)
    pair.damage(0, "1")
    start_until_noticed(pair)


def the_slave_was_away_before_the_master_went(pair: Pair) -> None:
    pair.kill(1)
    kept = list(pair.sent)
    pair.send()
    pair.lose_disk(0)
    pair.start(1)
    pair.sent = kept


def all_machines_go_down(pair: Pair) -> None:
    for number in (0, 1):  # the master first: it would take the slave out of the in-sync set
        pair.kill(number)
        pair.another_boot(number)


def a_slave_is_gone(pair: Pair) -> None:
    pair.lose_disk(1)
    pair.wait_gone(1)


def a_broker_is_gone(pair: Pair) -> None:
    broker = BrokerProcess(pair.zookeeper, pair.folder / "broker-3", 3, session_timeout_ms=2000)
    broker.start()
    pair.admin.create_topic("elsewhere", partitions=1, brokers=[3])
    broker.kill()
    wait_until(lambda: not pair.admin.brokers()[3].live, what="the end of its session")


def zookeeper_is_lost(pair: Pair) -> None:
    pair.run("metamq cluster export cluster.json")
    pair.send()
    pair.lose_zookeeper()


def zookeeper_is_taken_back(pair: Pair) -> None:
    """To before two promotions and some messages."""
    assert pair.server.data_dir is not None
    data, copy = pair.server.data_dir / "data", pair.folder / "yesterday"
    pair.server.freeze()
    shutil.copytree(data, copy)
    pair.server.thaw()
    for number in (1, 0):
        pair.admin.promote(0, number)
        pair.wait_in_sync()
    pair.send()
    pair.server.kill()
    shutil.rmtree(data)
    shutil.copytree(copy, data)
    pair.server.restart()
    wait_until(pair.is_taken_back, what="that ZooKeeper was taken back")


WHAT_HAPPENED: dict[str, Callable[[Pair], None]] = {
    "Runbook": nothing,
    "A planned promotion": nothing,
    "The master has crashed": the_master_dies,
    "A rolling restart": nothing,
    "The slave's disk is lost": lambda pair: pair.lose_disk(1),
    "The master's disk is lost": lambda pair: pair.lose_disk(0),
    "A data folder is moved to another disk": nothing,
    "A log of the slave is damaged": the_slaves_log_is_damaged,
    "A log of the master is damaged": the_masters_log_is_damaged,
    "A log of the master is damaged, and no slave is in sync": a_log_is_damaged_while_the_slave_is_away,
    "Only a slave that is not in sync is left": the_slave_was_away_before_the_master_went,
    "All machines went down at once": all_machines_go_down,
    "A replica is gone permanently": a_slave_is_gone,
    "A broker id is gone permanently": a_broker_is_gone,
    "ZooKeeper is lost": zookeeper_is_lost,
    "ZooKeeper was restored from an older copy": zookeeper_is_taken_back,
    "Ask for help": nothing,
}


@pytest.mark.slow
@pytest.mark.parametrize("title", WHAT_HAPPENED)
def test_the_commands_of_a_section_run_as_printed_and_lose_nothing(title: str, pair: Pair) -> None:
    blocks = sections()["# Runbook" if title == "Runbook" else title]
    assert blocks, f"{title} has no commands"
    WHAT_HAPPENED[title](pair)
    for block in blocks:
        pair.run(block)
    pair.send()
    assert sorted(pair.read()) == sorted(pair.sent)


def test_every_section_is_tried() -> None:
    assert [title.removeprefix("# ") for title in sections()] == list(WHAT_HAPPENED)
