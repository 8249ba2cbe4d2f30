"""The node of a broker id's delayed messages: how far they are moved.

    {"offsets": {"<topic id>/0": [17, 3]}, "committing": {"64656c...": [0, 2]}}

`offsets` has the first offset of each log that is not moved, and the epoch of the message before it: after an accepted
loss later messages get the offsets of lost ones, and are not taken for moved. A change is made by compare-and-set, and
decides the transaction that it adds to `committing`: its messages are moved. `committing` has such transactions, by the
hexadecimal gtrid, with the brokers at which they may still be prepared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from metamq.zk.documents import read_document
from metamq.zk.session.change import NEW, write_version

if TYPE_CHECKING:
    from metamq.zk.session.session import Session


@dataclass(frozen=True, slots=True)
class MovedDelays:
    """The content of the node, and its version."""

    offsets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    committing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    version: int = NEW


def _decode(document: dict[str, Any]) -> MovedDelays:
    offsets = {str(log): (int(offset), int(epoch)) for log, (offset, epoch) in document["offsets"].items()}
    committing = {str(gtrid): tuple(map(int, brokers)) for gtrid, brokers in document["committing"].items()}
    return MovedDelays(offsets, committing)


async def read_moved(session: Session, broker_id: int) -> MovedDelays:
    """Returns the node. Raises CorruptData, ConnectionLost."""
    path = session.paths.delays(broker_id)
    node = await session.get_or_none(path)
    if node is None:
        return MovedDelays()
    hint = "Delete this node with ZooKeeper's own client: then delayed messages that are kept are delivered again."
    return replace(read_document(f"the delays in {path}", node.data, _decode, hint=hint), version=node.version)


async def write_moved(session: Session, broker_id: int, moved: MovedDelays) -> MovedDelays | None:
    """Stores a change of what was read, and returns it with its new version; None if another process has changed it
    since. Raises ConnectionLost: then it may be stored."""
    data = json.dumps({"offsets": moved.offsets, "committing": moved.committing}).encode()
    version = await write_version(session, session.paths.delays(broker_id), data, moved.version)
    return None if version is None else replace(moved, version=version)
