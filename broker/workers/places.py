"""The data folder of each worker: `broker-<id>` in the command's data folder. A pure decision, and what it looks at.

A folder that a single broker made is used in its place: the worker with that broker id continues with it, and the other
workers get folders in it. Nothing is moved, so the way back to a single broker is open, too. Two folders of one id, and
folders of ids that the command does not run, are errors: otherwise their messages would seem lost.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from metamq.broker.data.data_folder import folders_below, owner_of, worker_folder
from metamq.errors import ConfigError


def find_places(data: Path, ids: range) -> list[Path]:
    """Returns the data folder of each broker id. It may be missing. Raises ConfigError."""
    return places(data, ids, owner_of(data), folders_below(data))


def places(data: Path, ids: range, owner: int | None, below: Collection[int]) -> list[Path]:
    """Returns the data folder of each broker id.

    `owner`: the broker id of `data` itself, if a single broker made it. `below`: the ids that have a folder in it.
    Raises ConfigError.
    """
    run = f"--id {ids[0]} --processes {len(ids)}"
    if owner is not None and owner not in ids:
        raise ConfigError(
            f"the data folder {data} belongs to broker {owner}, but {run} runs the brokers {ids[0]} to {ids[-1]}",
            hint=f"Give --id {owner}, or another --data.",
        )
    if owner is not None and owner in below:
        raise ConfigError(
            f"both {data} and {worker_folder(data, owner)} are data folders of broker {owner}",
            hint="Keep the folder that the broker used last, and move the other one to another place.",
        )
    if left := sorted(set(below) - set(ids)):
        folders = ", ".join(str(worker_folder(data, one)) for one in left)
        raise ConfigError(
            f"{run} runs the brokers {ids[0]} to {ids[-1]}, but there is data of others: {folders}",
            hint=f"Give --processes {left[-1] - ids[0] + 1}, "
            "or run these brokers elsewhere, and move their folders there."
            if left[0] > ids[0]
            else f"Give --id {left[0]}, or run these brokers elsewhere, and move their folders there.",
        )
    return [data if one == owner else worker_folder(data, one) for one in ids]
