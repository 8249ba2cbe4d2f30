"""The data folder: one process, one broker id, and when a replica is a new incarnation."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metamq.broker.data.data_folder import FORMAT, GONE, DataFolder
from metamq.errors import ConfigError, DiskFull

HOLDER = """
import sys
from pathlib import Path
from metamq.broker.data.data_folder import DataFolder

folder = DataFolder.open(Path(sys.argv[1]), 0)
print("open", flush=True)
sys.stdin.readline()
folder.close(clean=True)
"""


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path: Path, other_process: subprocess.Popen[str]) -> None:
    data = tmp_path / "data"
    with pytest.raises(ConfigError, match=f"data folder {data} is in use by process {other_process.pid}") as caught:
        DataFolder.open(data, 0)
    assert caught.value.hint
    other_process.kill()
    other_process.wait(60)
    DataFolder.open(data, 0).close(clean=True)


def test_a_second_open_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, 0)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        DataFolder.open(tmp_path, 0)
    folder.close(clean=True)
    folder.close(clean=True)
    DataFolder.open(tmp_path, 0).close(clean=True)


@pytest.mark.parametrize(
    ("clean", "boot", "incarnation"),
    [(True, "boot 1", 1), (True, "boot 2", 1), (False, "boot 1", 1), (False, "boot 2", 2), (False, "", 2)],
)
def test_incarnations(tmp_path: Path, clean: bool, boot: str, incarnation: int) -> None:
    """Only a host that went down without a clean stop may have lost what was written."""
    DataFolder.open(tmp_path, 0, boot_id="boot 1").close(clean=clean)
    folder = DataFolder.open(tmp_path, 0, boot_id=boot)
    assert folder.incarnation == incarnation
    folder.close(clean=False)


def test_a_clean_stop_counts_once(tmp_path: Path) -> None:
    DataFolder.open(tmp_path, 0, boot_id="boot 1").close(clean=True)
    DataFolder.open(tmp_path, 0, boot_id="boot 1").close(clean=False)
    folder = DataFolder.open(tmp_path, 0, boot_id="boot 2")
    assert folder.incarnation == 2
    folder.close(clean=True)
    folder = DataFolder.open(tmp_path, 0, boot_id="boot 3")
    assert folder.incarnation == 2
    folder.close(clean=True)


def same_folder(data: Path) -> Path:
    return data


def renamed(data: Path) -> Path:
    return data.rename(data.with_name("renamed"))


def moved_into_another_folder(data: Path) -> Path:
    other = data.with_name("other")
    other.mkdir()
    for path in data.iterdir():
        path.rename(other / path.name)
    return other


def upgraded(data: Path) -> Path:
    """From a release that did not note which lock it is."""
    meta = json.loads((data / "meta.json").read_text())
    del meta["lock"], meta["file"]
    (data / "meta.json").write_text(json.dumps(meta))
    return data


def copied(data: Path) -> Path:
    subprocess.run(["cp", "-r", str(data), str(data.with_name("copy"))], check=True)
    return data.with_name("copy")


def copied_to_the_letter(data: Path) -> Path:
    subprocess.run(["cp", "-a", str(data), str(data.with_name("copy"))], check=True)
    return data.with_name("copy")


def restored(data: Path) -> Path:
    """The new files may have the inodes' numbers of the old ones."""
    backup = copied_to_the_letter(data)
    shutil.rmtree(data)
    subprocess.run(["cp", "-a", str(backup), str(data)], check=True)
    return data


def restored_over_it(data: Path) -> Path:
    """Every file that is there stays the same file, `lock` too."""
    backup = copied_to_the_letter(data)
    DataFolder.open(data, 0).close(clean=True)
    subprocess.run(["cp", "-a", f"{backup}/.", str(data)], check=True)
    return data


def moved_to_another_disk(data: Path) -> Path:
    return Path(shutil.copytree(data, tempfile.mkdtemp(dir="/dev/shm"), dirs_exist_ok=True))


def without_its_lock(data: Path) -> Path:
    (data / "lock").unlink()
    return data


@pytest.mark.parametrize("happens", [same_folder, renamed, moved_into_another_folder, upgraded])
@pytest.mark.parametrize("clean", [True, False])
def test_the_same_folder(tmp_path: Path, clean: bool, happens: Callable[[Path], Path]) -> None:
    folder = DataFolder.open(tmp_path / "data", 0)
    lock = folder.lock
    folder.close(clean=clean)
    folder = DataFolder.open(happens(tmp_path / "data"), 0)
    assert (folder.is_copy, folder.lock) == (False, lock)
    folder.close(clean=clean)


COPIES = [copied, copied_to_the_letter, restored, restored_over_it, moved_to_another_disk, without_its_lock]


@pytest.mark.parametrize("happens", COPIES)
def test_a_copy_is_one_until_it_has_begun_anew(tmp_path: Path, happens: Callable[[Path], Path]) -> None:
    folder = DataFolder.open(tmp_path / "data", 0)
    lock, identity = folder.lock, folder.identity
    folder.close(clean=True)
    data = happens(tmp_path / "data")
    try:
        for _ in range(2):  # as by a start that was refused
            folder = DataFolder.open(data, 0)
            assert (folder.is_copy, folder.identity, folder.incarnation) == (True, identity, 1)
            assert (folder.lock == lock) is (happens is restored_over_it)
            folder.close(clean=True)
        folder = DataFolder.open(data, 0)
        folder.begin_after(7, "is a copy", is_older=True)
        assert not folder.is_copy
        assert folder.incarnation == stored_incarnation(data) > 8
        folder.close(clean=False)
        folder = DataFolder.open(data, 0)
        assert not folder.is_copy
        folder.close(clean=True)
    finally:
        if not data.is_relative_to(tmp_path):
            shutil.rmtree(data)


def test_two_copies_and_their_original_never_come_to_one_incarnation(tmp_path: Path) -> None:
    DataFolder.open(tmp_path / "data", 0, boot_id="boot 1").close(clean=False)
    drawn = []
    for number in range(2):
        data = tmp_path / f"copy-{number}"
        subprocess.run(["cp", "-r", str(tmp_path / "data"), str(data)], check=True)
        folder = DataFolder.open(data, 0, boot_id="boot 1")
        folder.begin_after(1, "is a copy", is_older=True)
        drawn.append(folder.incarnation)
        folder.close(clean=True)
    folder = DataFolder.open(tmp_path / "data", 0, boot_id="boot 2")
    assert len({*drawn, folder.incarnation}) == 3
    folder.close(clean=True)


def test_after_another_boot_of_the_host_it_is_another_lock(tmp_path: Path) -> None:
    """A clone of a machine has the same files."""
    folder = DataFolder.open(tmp_path, 0, boot_id="boot 1")
    lock = folder.lock
    folder.close(clean=True)
    folder = DataFolder.open(tmp_path, 0, boot_id="boot 2")
    assert folder.lock != lock
    assert not folder.is_copy
    folder.close(clean=True)


def stored_incarnation(path: Path) -> int:
    meta = json.loads((path / "meta.json").read_text())
    assert isinstance(meta["incarnation"], int)
    return meta["incarnation"]


def test_losses_before_anybody_knows_the_incarnation_are_one(tmp_path: Path) -> None:
    """A thousand torn logs at one start; but one that is found later, when others count on us, is a loss of its own."""
    folder = DataFolder.open(tmp_path, 0)
    for _ in range(3):
        folder.raise_incarnation("t/0 is torn")
        assert folder.incarnation == stored_incarnation(tmp_path) == 2
    folder.incarnation_known()
    for _ in range(3):
        folder.raise_incarnation("t/1 is torn")
        assert folder.incarnation == stored_incarnation(tmp_path) == 3
    folder.close(clean=True)
    folder = DataFolder.open(tmp_path, 0)
    assert folder.incarnation == 3
    folder.raise_incarnation("t/0 is torn")
    assert stored_incarnation(tmp_path) == 4
    folder.close(clean=False)


def test_a_host_that_went_down_and_torn_logs_are_one_loss(tmp_path: Path) -> None:
    DataFolder.open(tmp_path, 0, boot_id="boot 1").close(clean=False)
    folder = DataFolder.open(tmp_path, 0, boot_id="boot 2")
    folder.raise_incarnation("t/0 is torn")
    assert folder.incarnation == stored_incarnation(tmp_path) == 2
    folder.close(clean=False)


def test_what_is_kept(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, 7, 2)
    identity = folder.identity
    assert (folder.broker_id, folder.replica, folder.generation) == (7, 2, 0)
    folder.follow_generation(3)
    folder.close(clean=False)
    folder = DataFolder.open(tmp_path, 7, 2)
    assert (folder.replica, folder.identity, folder.generation) == (2, identity, 3)
    folder.close(clean=True)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["broker_id"], meta["format"], meta["clean"]) == (7, FORMAT, True)


def test_another_replicas_folder_is_refused(tmp_path: Path) -> None:
    DataFolder.open(tmp_path, 7, 1).close(clean=True)
    with pytest.raises(ConfigError, match=r"belongs to replica 1 of broker 7, not 0\. Start it with --replica 1"):
        DataFolder.open(tmp_path, 7)


def test_another_brokers_folder_is_refused(tmp_path: Path) -> None:
    DataFolder.open(tmp_path, 7).close(clean=True)
    before = (tmp_path / "meta.json").read_bytes()
    with pytest.raises(ConfigError, match="belongs to broker 7, not 8"):
        DataFolder.open(tmp_path, 8)
    assert (tmp_path / "meta.json").read_bytes() == before
    DataFolder.open(tmp_path, 7).close(clean=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}, but this release knows formats up to {FORMAT}"),
        ({"format": "x"}, "format x"),
        ({"surprise": 1}, "is incomplete"),
        (None, "cannot be read"),
    ],
)
def test_meta_data_that_cannot_be_understood(tmp_path: Path, change: dict[str, object] | None, match: str) -> None:
    DataFolder.open(tmp_path, 7).close(clean=True)
    path = tmp_path / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text("half a fi" if change is None else json.dumps(meta | change))
    with pytest.raises(ConfigError, match=match) as caught:
        DataFolder.open(tmp_path, 7)
    assert caught.value.hint


def test_topics_without_meta_data_are_nobodys(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, 7)
    folder.partition_folder("flights", "t1", 0).mkdir()
    folder.close(clean=True)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"meta\.json is missing"):
        DataFolder.open(tmp_path, 7)


def test_topics_are_listed_and_removed(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, 0)
    for topic, topic_id, indexes in (
        ("flights", "t1", (0, 2, 10)),
        ("air.lines_2-x", "t2", (1,)),
        ("gone", "t3", (0,)),
    ):
        for index in indexes:
            folder.partition_folder(topic, topic_id, index).mkdir()
    assert [(t.topic, t.topic_id, t.partitions) for t in folder.topics()] == [
        ("air.lines_2-x", "t2", (1,)),
        ("flights", "t1", (0, 2, 10)),
        ("gone", "t3", (0,)),
    ]
    (tmp_path / "topics" / "gone@t3" / "0" / "file").write_bytes(b"x")
    folder.remove_topic("gone", "t3")
    folder.remove_topic("gone", "t3")
    folder.remove_topic("air.lines_2-x", "t2")
    assert os.listdir(tmp_path / "topics") == ["flights@t1"]
    folder.close(clean=True)


def test_a_removal_broken_off_is_finished_at_the_next_open(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, 0)
    folder.partition_folder("flights", "t1", 0).mkdir()
    folder.close(clean=True)
    (tmp_path / "topics" / "flights@t1").rename(tmp_path / "topics" / ".removed-1-flights@t1")
    folder = DataFolder.open(tmp_path, 0)
    assert folder.topics() == []
    assert os.listdir(tmp_path / "topics") == []
    folder.close(clean=True)


@pytest.mark.parametrize("topic", ["", "a/b", "..", ".hidden", "a@b", "a\0b"])
def test_names_that_are_no_folders(tmp_path: Path, topic: str) -> None:
    folder = DataFolder.open(tmp_path, 0)
    with pytest.raises(ConfigError, match="cannot be the name of a folder"):
        folder.partition_folder(topic, "t1", 0)
    folder.close(clean=True)


def test_a_topics_folder_that_is_there_already_becomes_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It may come from a process that was killed between making it and syncing the folder above.
    made = DataFolder.open(tmp_path, 0)
    made.partition_folder("t", "1", 0)
    made.close(clean=False)
    synced: list[str] = []
    os_fsync = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        os_fsync(fd)

    folder = DataFolder.open(tmp_path, 0)
    monkeypatch.setattr(os, "fsync", fsync)
    for index in range(3):
        folder.partition_folder("t", "1", index)
    assert synced == [str(tmp_path / "topics")], "once is enough"
    folder.remove_topic("t", "1")
    folder.partition_folder("t", "1", 0)
    assert synced == [str(tmp_path / "topics")] * 3
    folder.close(clean=True)


def test_free_bytes(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, 0)
    assert 0 < folder.free_bytes() < 1 << 60
    folder.close(clean=True)


def test_the_highest_epoch_is_kept_and_never_falls(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, 0)
    assert (folder.epoch, folder.state_version) == (0, -1)
    folder.know_epoch(3, 7)
    folder.know_epoch(2, 9)
    folder.know_epoch(3)
    folder.close(clean=False)
    folder = DataFolder.open(tmp_path, 0)
    assert (folder.epoch, folder.state_version) == (3, 7)
    folder.know_epoch(3, 8)
    folder.know_epoch(4)
    assert (folder.epoch, folder.state_version) == (4, -1)
    folder.close(clean=True)


def test_a_folder_of_a_release_that_kept_no_epoch_opens(tmp_path: Path) -> None:
    DataFolder.open(tmp_path, 0).close(clean=True)
    path = tmp_path / "meta.json"
    document = json.loads(path.read_text())
    for field in ("epoch", "state_version"):
        del document[field]
    path.write_text(json.dumps(document))
    folder = DataFolder.open(tmp_path, 0)
    assert folder.epoch == 0
    folder.close(clean=True)


@pytest.mark.slow
def test_topics_are_made_while_others_are_removed(tmp_path: Path) -> None:
    """Each in a thread of its own, and both look at the record of partitions."""
    topics = 300
    folder = DataFolder.open(tmp_path, 0)
    for number in range(topics):
        folder.partition_folder(f"old{number}", "1", 0)
        folder.were_made(f"old{number}", "1", range(10))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            making = thread.submit(
                lambda: [folder.were_made(f"new{number}", "1", range(10)) for number in range(topics)]
            )
            for number in range(topics):
                folder.remove_topic(f"old{number}", "1")
            making.result()
    finally:
        sys.setswitchinterval(interval)
    assert folder.missing("new0", "1", range(10)) == dict.fromkeys(range(10), GONE)
    assert not folder.missing("old0", "1", range(10))
    folder.close(clean=True)


def test_a_line_that_found_no_room_spoils_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        os.ftruncate(fd, os.fstat(fd).st_size - len("2\n"))  # "+ a@1/12" becomes another partition's
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = DataFolder.open(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull):
            folder.were_made("a", "1", [12])
    folder.were_made("b", "1", [0])
    folder.close(clean=True)
    folder = DataFolder.open(tmp_path, 0)
    assert folder.missing("b", "1", [0]) == {0: GONE}
    assert not folder.missing("a", "1", [1, 12])
    folder.close(clean=True)


@pytest.mark.parametrize("step", ["pwrite", "ftruncate", "fsync"])
def test_a_new_folder_without_room_at_any_step_opens_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        for _attempt in range(2):
            with pytest.raises(DiskFull):
                DataFolder.open(tmp_path / "new", 0)
    DataFolder.open(tmp_path / "new", 0).close(clean=True)


def test_the_record_of_partitions_has_a_durable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced at the start. Where the older file came back after a crash, what was added since would be gone."""
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    folder = DataFolder.open(tmp_path, 0)
    written = synced.index(f"{tmp_path}/partitions.tmp")
    assert str(tmp_path) in synced[written:]
    folder.close(clean=True)


OF_AN_IMAGE = """
import os, sys
from pathlib import Path
from metamq.broker.data.data_folder import DataFolder
folder = DataFolder.open(Path(sys.argv[1]), 0)
print(folder.is_copy, folder.missing("t", "id", [0]))
if folder.is_copy:
    folder.begin_after(1, "is a copy", is_older=False)
flushed = os.open(sys.argv[1] + "/topics/t@id/0/flushed", os.O_RDWR)
os.write(flushed, b"what the log writes")
folder.close(clean=True)
"""


def test_a_folder_in_a_containers_image_is_its_own_after_the_first_start(tmp_path: Path) -> None:
    """The first write to a file of an image makes another file of it, with a later birth."""
    DataFolder.open(tmp_path / "image", 0).close(clean=True)
    log = tmp_path / "image" / "topics" / "t@id" / "0"
    log.mkdir(parents=True)
    for name in ("layer", "work", "mounted"):
        (tmp_path / name).mkdir()
    (log / "flushed").write_bytes(b"flushed")
    mount = "mount -t tmpfs none layer && mkdir layer/upper layer/work && mount -t overlay none -o "
    mount += "lowerdir=image,upperdir=layer/upper,workdir=layer/work mounted"
    run = ["unshare", "-rm", "sh", "-c", f'{mount} || exit 9; for i in 1 2; do "$0" -c "$1" mounted || exit 1; done']
    done = subprocess.run([*run, sys.executable, OF_AN_IMAGE], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode == 9 or "unshare failed" in done.stderr:
        pytest.skip("mounting an overlay file system needs root, and a kernel that has it")
    assert done.stdout.splitlines() == ["True {}", "False {}"], done.stderr
