"""The contents of a data folder, read without changing it: for a restore of ZooKeeper.

Meanwhile the folder's lock is held, shared: no broker can use it. A report is a plain value that can be sent as
JSON: the folders are on different machines, and one command decides about all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from metamq.broker.data import made_partitions, topic_settings
from metamq.broker.data.data_folder import FORMAT, GONE, REPLACED, current_boot
from metamq.broker.data.folder_lock import mark_of
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.epochs import Epoch, EpochList
from metamq.broker.log.disk.files import ReadOnlyFiles
from metamq.broker.log.disk.flushed import FILE_NAME, FlushFile, FlushPoint
from metamq.broker.log.disk.scan import checked_batches
from metamq.broker.log.disk.segments import Segment, take_inventory
from metamq.broker.log.store import SegmentStore
from metamq.errors import ConfigError, CorruptData, MetamqError
from metamq.zk.cluster.topics import TopicConfig, from_json, to_json
from metamq.zk.names import partition_name

KIND = "metamq data folder"
REPORT_FORMAT = 1
Place = tuple[str, str, int]
"""A partition of one broker id: topic, topic id, index."""
_PLAIN: dict[str, Any] = {
    "path": str, "machine": str, "cluster_id": str, "broker_id": int, "replica": int, "incarnation": int,
    "generation": int, "epoch": int, "reign": int, "becomes_new": str,
}  # fmt: skip
_TOPIC_FOLDER = re.compile(r"([^/@.][^/@]*)@([^/@]+)")
_NO_META_HINT = (
    "The logs do not identify the replica. Restore the file from a backup, or leave the folder out if "
    "another replica of the same broker has its own."
)


@dataclass(frozen=True, slots=True)
class LogReport:
    """The log of one partition. `epochs` has (epoch, offset, position) of each epoch's first batch, oldest first.

    `problem` is the reason why the log cannot be opened; the other fields are then unknown.
    """

    topic: str
    topic_id: str
    index: int
    end_offset: int = 0
    end_position: int = 0
    stable_offset: int = 0
    epochs: tuple[Epoch, ...] = ()
    problem: str = ""

    @property
    def place(self) -> Place:
        """The partition: topic, topic id, index."""
        return self.topic, self.topic_id, self.index

    @property
    def reach(self) -> tuple[int, int]:
        """(last epoch, end). Logs of a partition with equal reach are equal: see metamq.broker.log.disk.epochs."""
        return (self.epochs[-1].epoch if self.epochs else -1, self.end_position)


@dataclass(frozen=True, slots=True)
class FolderReport:
    """The data folder of one replica. `epoch` is the highest epoch that it knows. `reign` is the same epoch if this
    replica was its master and has lost nothing since; else 0.

    `becomes_new` is the reason why its broker will be a new incarnation at its next start, or empty.
    """

    path: str
    machine: str
    cluster_id: str
    broker_id: int
    replica: int
    incarnation: int
    generation: int
    epoch: int
    reign: int
    becomes_new: str
    settings: Mapping[str, tuple[TopicConfig, int]]
    """The settings by topic folder, "topic@id", and the time from which they are known, in milliseconds since 1970."""
    logs: Mapping[Place, LogReport]

    def __str__(self) -> str:
        return f"{self.path} on {self.machine}"

    def to_json(self) -> dict[str, Any]:
        """Returns the document that `from_json` reads."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        settings = {name: [to_json(config).decode(), ms] for name, (config, ms) in self.settings.items()}
        logs = [asdict(log) for log in self.logs.values()]
        return {"kind": KIND, "format": REPORT_FORMAT, **plain, "settings": settings, "logs": logs}

    @classmethod
    def from_json(cls, text: str | bytes, what: str) -> FolderReport:
        """Reads a report. `what` names it in errors. Raises ConfigError."""
        try:
            document = json.loads(text)
            if (document["kind"], document["format"]) != (KIND, REPORT_FORMAT):
                raise ValueError("it is of another kind or format")
            logs = [
                LogReport(**{**log, "epochs": EpochList.of(tuple(entry) for entry in log["epochs"]).entries})
                for log in document["logs"]
            ]
            settings = {
                name: (from_json(name.partition("@")[0], config.encode()), int(ms))
                for name, (config, ms) in document["settings"].items()
            }
            plain = {name: kind(document[name]) for name, kind in _PLAIN.items()}
            return cls(**plain, settings=settings, logs={log.place: log for log in logs})
        except (ValueError, TypeError, KeyError, AttributeError, MetamqError) as error:
            hint = "Make it with `metamq cluster inspect DIR` of the same release."
            raise ConfigError(f"{what} does not describe a data folder: {error}", hint=hint) from error


def inspect_folder(path: Path) -> FolderReport:
    """Reads a data folder that no broker uses. Raises ConfigError, OSError."""
    path = data_folder(path)
    with locked(path) as lock_mark:
        meta, mark = read_meta(path)
        files = ReadOnlyFiles()
        try:
            made = made_partitions.recorded(path)
            marks = {} if is_copy(meta, lock_mark, mark) else made
            logs = {log.place: log for log in _missing(path, made)}
            logs |= {log.place: log for log in _logs(path, meta["broker_id"], files, marks)}
        finally:
            files.close()
        becomes_new = _becomes_new(meta, lock_mark, mark)
        epoch = max(meta["epoch"], *(epoch.epoch for log in logs.values() for epoch in log.epochs), 0)
        return FolderReport(
            path=str(path),
            machine=socket.gethostname(),
            cluster_id=meta["cluster_id"],
            broker_id=meta["broker_id"],
            replica=meta["replica"],
            incarnation=meta["incarnation"],
            generation=meta["generation"],
            epoch=epoch,
            reign=epoch if epoch == meta["epoch"] and _is_whole(meta, becomes_new) else 0,
            becomes_new=becomes_new,
            settings=dict(_settings(path)),
            logs=logs,
        )


def data_folder(path: Path) -> Path:
    """The absolute path of the data folder for a user's path: the folder of `metamq up` has the data folder inside."""
    path = Path(path).absolute()
    if not (path / "meta.json").is_file() and (path / "broker" / "meta.json").is_file():
        return path / "broker"
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[str]:
    """Keeps brokers out of the folder; yields the mark of its lock, or "" if none. Raises ConfigError, OSError."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY)
    except FileNotFoundError:
        yield ""
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"the data folder {path} is in use by process {pid or 'unknown'}",
            hint="Stop the broker first: a running broker changes its folder.",
        ) from None
    try:
        yield mark_of(fd)
    finally:
        os.close(fd)


def lock_mark_of(path: Path) -> str:
    """The mark of a data folder's lock, held or not; "" if it has none. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open(path / "lock", "rb") as file:
        return mark_of(file.fileno())
    return ""


def is_replaced(partition: Path, mark: str | None) -> bool:
    """True if a partition's files do not have the recorded mark. False if the mark is unknown. Raises OSError."""
    path = partition / FILE_NAME
    if not mark or not path.exists():
        return False
    with open(path, "rb") as file:
        return mark_of(file.fileno()) != mark


def read_meta(path: Path) -> tuple[dict[str, Any], str]:
    """The fields of meta.json that a report uses, and the mark of that file. Raises ConfigError."""
    try:
        with open(path / "meta.json") as file:
            mark = mark_of(file.fileno())
            document = json.load(file)
        if document["format"] > FORMAT:
            raise ConfigError(
                f"the data folder {path} has format {document['format']}, but this release knows formats up to "
                f"{FORMAT}",
                hint="Use the metamq release that last used the folder, or a newer one.",
            )
        meta: dict[str, Any] = {name: int(document[name]) for name in ("broker_id", "replica", "incarnation")}
        meta["generation"] = int(document.get("generation", 0))
        meta["epoch"] = int(document.get("epoch", 0))
        meta["state_version"] = int(document.get("state_version", -1))
        meta["reigned_as"] = int(document.get("reigned_as", 0))
        meta["clean"] = bool(document["clean"])
        meta |= {name: str(document.get(name, "")) for name in ("cluster_id", "boot_id", "lock", "file")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if not path.is_dir() or not (path / "topics").is_dir():
            hint = "Give the folder that the broker uses as --data."
            raise ConfigError(f"{path} is not a broker's data folder", hint=hint) from error
        raise ConfigError(f"{path / 'meta.json'} cannot be read: {error!r}", hint=_NO_META_HINT) from error
    if not meta["cluster_id"]:
        raise ConfigError(f"the data folder {path} was never part of a cluster", hint="It has no data: leave it out.")
    return meta, mark


def is_copy(meta: Mapping[str, Any], lock_mark: str, mark: str) -> bool:
    """True if the whole folder is a copy, by the results of read_meta() and the mark of its lock."""
    return meta["lock"] not in ("", lock_mark) or meta["file"] not in ("", mark)


def _becomes_new(meta: Mapping[str, Any], lock_mark: str, mark: str) -> str:
    """The reason for a new incarnation at the next start, by the rules of DataFolder; "" if there is none."""
    if is_copy(meta, lock_mark, mark):
        return "it is a copy, or was moved to another disk"
    boot_id = current_boot()
    if not meta["clean"] and (not boot_id or boot_id != meta["boot_id"]):
        return "its host went down without a clean stop of the broker"
    return ""


def _is_whole(meta: Mapping[str, Any], becomes_new: str) -> bool:
    """True if it was the master of its epoch and is still the same incarnation."""
    return not becomes_new and meta["state_version"] >= 0 and meta["reigned_as"] == meta["incarnation"]


def _topic_folders(path: Path) -> Iterator[tuple[str, str, Path]]:
    for folder in sorted((path / "topics").iterdir()):
        match = _TOPIC_FOLDER.fullmatch(folder.name)
        if match is not None and folder.is_dir():
            yield match[1], match[2], folder


def _settings(path: Path) -> Iterator[tuple[str, tuple[TopicConfig, int]]]:
    for topic, topic_id, folder in _topic_folders(path):
        known = topic_settings.load(folder, topic)
        if known is not None and known.config.id == topic_id:
            yield folder.name, (known.config, known.since_ms)


def _logs(path: Path, broker_id: int, files: ReadOnlyFiles, marks: Mapping[str, str]) -> Iterator[LogReport]:
    """Reports all logs. `marks`: the expected marks of partitions' files, by "<topic>@<topic id>/<index>"."""
    for topic, topic_id, folder in _topic_folders(path):
        for index in sorted(int(one.name) for one in folder.iterdir() if one.name.isdecimal()):
            name = f"{topic}/{partition_name(broker_id, index)}"
            try:
                if is_replaced(folder / str(index), marks.get(f"{folder.name}/{index}")):
                    raise CorruptData(f"{name}: {folder / str(index)}", REPLACED)
                yield _log(topic, topic_id, index, str(folder / str(index)), name, files)
            except (CorruptData, OSError) as error:
                yield LogReport(topic, topic_id, index, problem=str(error))


def _missing(path: Path, made: Iterable[str]) -> Iterator[LogReport]:
    """Reports each recorded partition as missing. The reports of existing ones replace these."""
    for name in made:
        topic_folder, _slash, index = name.rpartition("/")
        topic, _at, topic_id = topic_folder.rpartition("@")
        yield LogReport(topic, topic_id, int(index), problem=f"{GONE}: {path / 'topics' / name}")


def _log(topic: str, topic_id: str, index: int, folder: str, name: str, files: ReadOnlyFiles) -> LogReport:
    """The result that recovery would have. Raises CorruptData, OSError."""
    point = FlushFile(folder, files).load(name)
    inventory = take_inventory(folder)
    if point is None:
        if any(segment.size_bytes for segment in inventory.segments):
            raise CorruptData(f"{name}: {folder}/flushed", "the file is missing")
        return LogReport(topic, topic_id, index)  # its creation was interrupted
    if point.emptying:
        return LogReport(topic, topic_id, index, point.start_offset, point.start_position, point.start_offset)
    segments, end_offset, end_position = _intact(name, folder, inventory.segments, point, files)
    store = SegmentStore(folder, files, segments, inventory.snapshots, LogConfig().index_interval_bytes)
    epochs, _is_saved = store.load_epochs(point.start_offset, point.start_position, end_position)
    return LogReport(
        topic, topic_id, index, end_offset, end_position, min(point.stable_offset, end_offset), epochs.entries
    )


def _intact(
    name: str, folder: str, found: list[Segment], point: FlushPoint, files: ReadOnlyFiles
) -> tuple[list[Segment], int, int]:
    """The segments up to the last intact batch, and its end. Raises CorruptData if flushed bytes are missing."""
    start = point.start_position
    segments = [one for one in found if not (one.size_bytes and one.end_position <= start)]
    if not segments or segments[0].base_position != start:
        raise CorruptData(f"{name}: {folder}", "its first segment is missing", position=start)
    for before, after in pairwise(segments):
        if before.end_position != after.base_position and before.end_position < point.position:
            raise CorruptData(f"{name}: {before.path}", "the next segment is missing", position=before.end_position)
    offset, position = point.offset, point.position
    for number, segment in enumerate(segments):
        following = segments[number + 1].base_position if number + 1 < len(segments) else None
        if segment.end_position < position and following is None:
            raise CorruptData(f"{name}: {segment.path}", "it is too short", position=segment.end_position)
        if segment.end_position > position:
            for at, header, problem in checked_batches(files, segment, max(position, segment.base_position)):
                if header is None or problem is not None:
                    break
                offset, position = header.end_offset, at + header.size
        if segment.end_position >= point.position and following not in (None, position):  # the rest is a torn tail
            segment.size_bytes = position - segment.base_position
            return segments[: number + 1], offset, position
    segments[-1].size_bytes = position - segments[-1].base_position
    return segments, offset, position
