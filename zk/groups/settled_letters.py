"""The node of a group's settled dead letters: those that were sent again or purged.

    {"topic_id": "...", "settled": {"0-0": [[0, 17], [20, 21]]}, "committing": "1296388436_ZGxx..."}

Ranges are [first, end) of offsets in the dead-letter topic. Changes are made by compare-and-set, so the node decides
which of two processes settles a letter. `committing` is the transaction that sends the letters of the last change. That
change is the decision to commit, so the next process that changes the node commits the transaction first.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError, MessageTooLarge
from metamq.zk.documents import read_document
from metamq.zk.session.change import NEW, write_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from metamq.zk.session.session import Session

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SettledLetters:
    """The settled letters of a group, and the version of the node."""

    topic_id: str = ""
    settled: Mapping[str, Ranges] = field(default_factory=dict)
    committing: str = ""
    version: int = NEW

    def has(self, partition: str, offset: int) -> bool:
        """True if this letter is settled."""
        ranges = self.settled.get(partition, ())
        place = bisect_right(ranges, offset, key=itemgetter(0)) - 1
        return place >= 0 and offset < ranges[place][1]

    def of_topic(self, topic_id: str, starts: Mapping[str, int]) -> SettledLetters:
        """Returns this, or nothing settled if it belongs to an earlier topic of the name. Below `starts`, the first
        offsets of the partitions, everything counts as settled: so gaps disappear with their letters."""
        if self.topic_id != topic_id:
            return replace(self, topic_id=topic_id, settled={})
        settled = {
            partition: _joined([(0, starts.get(partition, 0)), *ranges]) for partition, ranges in self.settled.items()
        }
        return replace(self, settled=settled)

    def settle(self, letters: Iterable[tuple[str, int]], *, committing: str) -> SettledLetters:
        """Returns this with more letters, by partition and offset, and the transaction that sends them."""
        found = {partition: set(ranges) for partition, ranges in self.settled.items()}
        for partition, offset in letters:
            found.setdefault(partition, set()).add((offset, offset + 1))
        settled = {partition: _joined(sorted(ranges)) for partition, ranges in found.items()}
        return replace(self, settled=settled, committing=committing)


def _joined(ranges: Ranges) -> Ranges:
    """Returns ranges that are sorted by their first offsets, with adjacent ones as one, and without empty ones."""
    joined: Ranges = []
    for first, end in ranges:
        if first == end:
            continue
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


def _decode(document: dict[str, Any]) -> SettledLetters:
    settled = {
        str(partition): [(int(first), int(end)) for first, end in ranges]
        for partition, ranges in document["settled"].items()
    }
    return SettledLetters(str(document["topic_id"]), settled, str(document["committing"]))


async def read_settled(session: Session, group: str) -> SettledLetters:
    """Returns the settled letters. Raises CorruptData, ConnectionLost."""
    path = session.paths.settled_letters(group)
    node = await session.get_or_none(path)
    if node is None:
        return SettledLetters()
    hint = "Delete this node with ZooKeeper's own client: then no letter counts as settled."
    return replace(read_document(f"the settled letters in {path}", node.data, _decode, hint=hint), version=node.version)


async def write_settled(session: Session, group: str, settled: SettledLetters) -> SettledLetters | None:
    """Stores a change of what was read, and returns it with its new version.

    Returns None if another process has changed it since. Raises ConnectionLost, MessageTooLarge for too many gaps, and
    ConfigError for a group that has no owner yet: the owner of the new node would be this client.
    """
    is_new = settled.version == NEW and session.security.zookeeper is not None
    if is_new and not await session.exists(session.paths.group(group)):
        hint = "Start a consumer of the group once: then the group belongs to its user."
        raise ConfigError(f"the group {group!r} has no node in ZooKeeper", hint=hint)
    document = {"topic_id": settled.topic_id, "settled": settled.settled, "committing": settled.committing}
    path, data = session.paths.settled_letters(group), json.dumps(document).encode()
    try:
        version = await write_version(session, path, data, settled.version)
    except MessageTooLarge as error:
        error.hint = "The settled letters have too many gaps. Purge or resend all letters up to some time."
        raise
    return None if version is None else replace(settled, version=version)
