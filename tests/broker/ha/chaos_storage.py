"""What befalls data in the chaos tests: folders, bits, disks, and ZooKeeper's own data, which goes back in time.

Each happens to a slave while every replica is in sync, and the next one only once the last one was made good. So there
is always a replica that has all that was acknowledged, and what is lost all the same is a fault of the brokers.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from metamq.errors import MetamqError
from tests.broker.ha.test_taken_back import Copy
from tests.parts import wait_until

if TYPE_CHECKING:
    from metamq import Admin
    from tests.broker.ha.chaos import Chaos, NetworkedGroup

REMOVED = "a partition's folder removed at a stopped slave"
OLDER = "a slave back with an older copy of its folder"
FLIPPED = "a bit flipped in a stopped slave's log"
NO_ROOM = "a slave's disk full for a while"
TAKEN_BACK = "ZooKeeper taken back to a copy"
WAITED = "ZooKeeper taken back, a replica chosen by the plan"
SCRUB = {"scrub_every_s": 2.0, "scrub_bytes_per_s": 64 * 1024 * 1024}
"""So a flipped bit is found within a run."""
LISTED = "chaos*/[0-9]"
"""Folders of partitions that ZooKeeper lists, so that they are copied again."""
LATER = b"made after the copy"
CALM_S = 30.0
FOUND_S = 120.0


class Flipped(NamedTuple):
    """Where a bit is wrong."""

    path: Path
    copies: tuple[Path, ...]
    """The same log at the other replicas."""
    inode: int
    at: int
    value: int
    """The wrong one, of the whole byte."""

    @property
    def is_mended(self) -> bool:
        """Whether the wrong byte is gone.

        The log may have been copied again, into another file. Or the byte lay behind what the broker had flushed, and
        the broker took it for a torn tail: it cut there, and the log goes on in the same file.
        """
        inode, value = _byte(self.path, self.at)
        return inode != self.inode or value != self.value or value in [_byte(copy, self.at)[1] for copy in self.copies]


def _byte(path: Path, at: int) -> tuple[int, int]:
    """The inode and the byte there; 0 and -1 where there is none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(at)
        return os.fstat(file.fileno()).st_ino, (file.read(1) or [-1])[0]
    return 0, -1


class TemporaryDisk:
    """A file system of its own for a folder. Raises OSError, CalledProcessError where none can be mounted."""

    SIZE = "size=4g"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._mount("-t", "tmpfs", "-o", self.SIZE, "tmpfs")

    def _mount(self, *words: str) -> None:
        subprocess.run(["mount", *words, str(self.folder)], check=True, capture_output=True)

    def fill(self) -> None:
        """Not a page is left."""
        wait_until(self._has_shrunk, what="a disk no larger than its files")

    def _has_shrunk(self) -> bool:
        disk = os.statvfs(self.folder)
        used_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        with contextlib.suppress(subprocess.CalledProcessError):  # a page was written in between
            self._mount("-o", f"remount,size={used_bytes}")
            return True
        return False

    def make_room(self) -> None:
        self._mount("-o", f"remount,{self.SIZE}")

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def temporary_disk(folder: Path) -> TemporaryDisk | None:
    """None where this user, or this machine, mounts nothing."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return TemporaryDisk(folder)
    return None


class StorageFaults:
    """Chaos's actions on data. `zookeeper_goes_back` is called while no ZooKeeper runs."""

    def __init__(self, chaos: Chaos) -> None:
        self.zookeeper_goes_back: list[Callable[[], None]] = []
        self.accepted = 0
        """Promotions after which the generation is one more: a person picked a replica that lacks nothing."""
        self.later: dict[str, set[int]] = {}
        """The topics that ZooKeeper's copies lack, and the replicas that have acknowledged their message."""
        self._known_epoch = 0
        """The last one before ZooKeeper was taken back."""
        self._chaos = chaos
        self._flipped: Flipped | None = None

    @property
    def _group(self) -> NetworkedGroup:
        return self._chaos.group

    @property
    def _random(self) -> random.Random:
        return self._chaos.random

    def actions(self) -> dict[str, Callable[[], None]]:
        """By what they leave in `done`."""
        found = {REMOVED: self.remove_partition, OLDER: self.bring_back_copy, FLIPPED: self.flip}
        if self._group.ensemble is None:
            found[TAKEN_BACK] = self.take_back
        return found if self._group.disk is None else {**found, NO_ROOM: self.fill_disk}

    @property
    def is_mended(self) -> bool:
        """Whether nothing is wrong that nobody has found yet."""
        return self._flipped is None or self._flipped.is_mended

    def _calm_master(self) -> int | None:
        """The master, once all replicas are in sync and sound; None where that takes long."""
        if not self.is_mended:
            return None
        self._chaos.end_all()
        with contextlib.suppress(AssertionError):
            self._chaos.healed(CALM_S)
            return self._chaos.master()
        return None

    def _stop_slave(self) -> Path | None:
        """Its folder."""
        master = self._calm_master()
        if master is None:
            return None
        self._number = self._random.choice([n for n in range(len(self._group.replicas)) if n != master])
        replica = self._group.replicas[self._number]
        self._random.choice([replica.kill, replica.stop])()
        return replica.data

    def remove_partition(self) -> None:
        data = self._stop_slave()
        if data is not None:
            shutil.rmtree(self._random.choice(sorted((data / "topics").glob(LISTED))))
            self._chaos.done[REMOVED] += 1
            self._group.start_again(self._number)

    def bring_back_copy(self) -> None:
        """Of a moment before. The copy knows the in-sync set of that moment, with itself in it."""
        data = self._stop_slave()
        if data is None:
            return
        number, copy = self._number, data.with_name(f"{data.name}-older")
        shutil.copytree(data, copy)
        self._group.start_again(number)
        if self._calm_master() in (None, number):
            shutil.rmtree(copy)
            return
        self._group.end(number, self._group.replicas[number].kill)
        shutil.rmtree(data)
        copy.rename(data)
        self._chaos.done[OLDER] += 1
        if self._random.random() < 0.5:  # it is in the set until the master notices
            self._chaos.kill_master()
        self._group.start_again(number)

    def flip(self) -> None:
        """In the older half of a log, which no replica cuts."""
        data = self._stop_slave()
        if data is None:
            return
        paths = [path for path in sorted((data / "topics").glob(f"{LISTED}/*.log")) if path.stat().st_size > 1]
        if paths:
            path = self._random.choice(paths)
            at, bit = self._random.randrange(path.stat().st_size // 2), 1 << self._random.randrange(8)
            inode, value = _byte(path, at)
            with path.open("r+b", buffering=0) as file:
                file.seek(at)
                file.write(bytes([value ^ bit]))
            others = [replica.data for replica in self._group.replicas if replica.data != data]
            copies = tuple(other / path.relative_to(data) for other in others)
            self._flipped = Flipped(path, copies, inode, at, value ^ bit)
            self._chaos.done[FLIPPED] += 1
        self._group.start_again(self._number)

    def fill_disk(self) -> None:
        """That of the last replica, while it is a slave. It may be promoted before there is room again."""
        disk, number = self._group.disk, len(self._group.replicas) - 1
        if disk is not None and self._chaos.master() not in (None, number):
            disk.fill()
            self._chaos.done[NO_ROOM] += 1
            self._chaos.for_a_while("disk", disk.make_room)

    # -- ZooKeeper ----------------------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """To a copy from before a new topic, and from before a promotion or a slave that left the set, or neither."""
        master = self._calm_master()
        if master is None:
            return
        copy = Copy(self._group)
        self._make_topic(master)
        self._random.choice([self._promote, self._leave_set, lambda: None])()
        last = self._chaos.master()
        with contextlib.suppress(AssertionError):
            wait_until(self._know_the_epoch, CALM_S)
        if last is None or last != self._chaos.master() or not self._know_the_epoch():
            return
        numbers = range(len(self._group.replicas))
        if self._random.random() < 0.5:
            for number in self._random.sample(numbers, len(numbers)):
                self._group.replicas[number].kill()
        self._known_epoch = self._group.state().epoch
        copy.put_back(lambda: [goes_back() for goes_back in self.zookeeper_goes_back])
        self._chaos.done[TAKEN_BACK] += 1
        for number in sorted(numbers, key=lambda number: number != last):  # who knows most first
            if not self._group.replicas[number].running:
                self._group.start_again(number)
                self._group.replicas[number].wait_ready()
        with contextlib.suppress(AssertionError, MetamqError, KeyError):
            wait_until(self.waits_or_serves, FOUND_S, "the replicas wait, or serve")

    def _make_topic(self, master: int) -> None:
        """With a message. Nobody brings it back: it stays where it is."""
        name = f"later-{len(self.later)}"
        with contextlib.suppress(MetamqError, KeyError):
            self._group.cluster.create_topic(name, partitions=1, replication="sync")
            with self._group.cluster.producer() as producer:
                producer.send(name, LATER).result(CALM_S)
            self.later[name] = set(self._group.replication(master)["insync"])

    def lost_topics(self) -> list[str]:
        """Where a message of a topic that was made after a copy is missing."""
        return [
            f"{name} at replica {number}"
            for name, numbers in self.later.items()
            for number in numbers
            if not any(LATER in log.read_bytes() for log in self._logs(number, name))
        ]

    def _logs(self, number: int, topic: str) -> Iterator[Path]:
        return self._group.replicas[number].data.glob(f"topics/{topic}@*/0/*.log")

    def _promote(self) -> None:
        self._chaos.promote_any()

    def _know_the_epoch(self) -> bool:
        """Whether all that run know the last epoch. Else one of them may go on under the old state as a master: two
        masters acknowledge messages, and no person can know which to keep."""
        with contextlib.suppress(MetamqError, KeyError):
            epoch = self._group.state().epoch
            running = [n for n, replica in enumerate(self._group.replicas) if replica.running]
            return all(self._group.replication(number)["known_epoch"] == epoch for number in running)
        return False

    def _promote_by_hand(self, admin: Admin, chosen: int) -> None:
        """As a person does: reads the refusal, as "the state has changed meanwhile", and promotes again."""
        refusals: list[str] = []

        def is_done() -> bool:
            if self._chaos.master() is None:
                try:
                    admin.promote(0, chosen, accept_loss=True)
                except MetamqError as error:  # it may be done all the same
                    refusals.append(str(error))
            return self._chaos.master() is not None

        try:
            wait_until(is_done, what=f"replica {chosen} the master")
        except AssertionError as error:
            raise AssertionError(f"{error}: {refusals[-1:]}") from error

    def _leave_set(self) -> None:
        master = self._chaos.master()
        others = [n for n in range(len(self._group.replicas)) if n != master]
        slave = self._random.choice(others)
        self._group.replicas[slave].kill()
        with contextlib.suppress(AssertionError, MetamqError, KeyError):
            wait_until(lambda: slave not in self._group.replication(master)["insync"], FOUND_S)  # type: ignore[arg-type]

    def waits_or_serves(self) -> bool:
        """Whether a replica serves, or all are there and wait for a person; then the person decides."""
        return (self._chaos.master() is not None and self.is_decided) or self.decide()

    @property
    def is_decided(self) -> bool:
        """Whether ZooKeeper has the last epoch that was known before it was taken back, or a later one.

        A master that has not seen yet that ZooKeeper was taken back serves for a moment more. Raises MetamqError.
        """
        return self._group.state().epoch >= self._known_epoch

    def decide(self) -> bool:
        """Where ZooKeeper was taken back and all replicas are there: promotes the one that lacks least by the plan.

        The plan of at least one lists nothing that is lost, since each slave's log is the beginning of the master's.
        """
        numbers = range(len(self._group.replicas))
        with contextlib.suppress(MetamqError), self._group.cluster.admin() as admin:
            broker = admin.replicas().get(0)
            if broker is None or not broker.taken_back:
                return False
            plans = {number: admin.plan_promotion(0, number) for number in numbers}
            whole = [number for number in numbers if plans[number].lost == {}]
            assert whole, f"every replica lacks something: {plans}"
            self._promote_by_hand(admin, self._random.choice(whole))
            self.accepted += max(self._group.state().generation - broker.generation, 0)
            self._chaos.done[WAITED] += 1
            return True
        return False
