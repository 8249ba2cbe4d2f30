"""An operator that stops in the middle of a change of offsets: it has claimed the partitions, and has written nothing.

Arguments: ZooKeeper's address, the change, the group, the topic, the database. Prints "held", and continues after a
line on its standard input.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from typing import Any

from metamq import Admin, DatabaseOffsets
from metamq.client.admin import admin_groups


def main(zookeeper: str, what: str, group: str, topic: str, database: str) -> None:
    offsets = DatabaseOffsets(lambda: sqlite3.connect(database, timeout=60))
    changes: dict[str, Callable[[Admin], object]] = {
        "copy": lambda admin: admin.copy_offsets(f"{group}-source", group, overwrite=True),
        "delete": lambda admin: admin.delete_offsets(group, topic),
        "reset": lambda admin: admin.reset_offsets(group, topic, "earliest", offsets=offsets),
    }
    place, name = {
        "copy": (admin_groups, "commit_all"),
        "delete": (admin_groups, "clear"),
        "reset": (DatabaseOffsets, "commit"),
    }[what]
    write = getattr(place, name)

    async def later(*arguments: Any) -> Any:
        print("held", flush=True)
        sys.stdin.readline()
        return await write(*arguments)

    setattr(place, name, later)
    with Admin(zookeeper) as admin:
        changes[what](admin)
    print("written", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
