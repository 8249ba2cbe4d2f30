"""Automatic failover of a broker id in ZooKeeper: the operator's choice, and the list of switches.

`failover` is one persistent node per broker id, changed only by compare-and-set: the mode, a pause for maintenance, the
preferred replica, and the last switches. A broker id without this node fails over by an operator's command only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from metamq.errors import ConfigError
from metamq.zk.documents import fields, items, number, read_document, shown, text
from metamq.zk.errors import NodeExists
from metamq.zk.session.change import change_node

if TYPE_CHECKING:
    from metamq.zk.cluster.brokers import Watcher
    from metamq.zk.session.session import Session

Mode = Literal["auto", "manual"]
MODES: tuple[Mode, ...] = ("auto", "manual")
SWITCHES_KEPT = 100
LOST_CHARS_MAX = 1000
FAR = 1 << 53
"""A number above all times in milliseconds."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of the master. Times are in milliseconds; `at_ms` is Unix time by the new master's clock."""

    epoch: int
    cause: str
    """The reason, for people: "the session of the master ended"."""
    was: int
    """The replica that was the master."""
    now: int
    """The replica that is the master since."""
    at_ms: int
    took_ms: int
    """The time from the moment when the new master noticed the reason, to the moment when it took writes."""
    is_automatic: bool
    lost: str = ""
    """The messages that were given up, for people; empty: none."""


@dataclass(frozen=True, slots=True)
class Failover:
    """The failover of a broker id. The default is that of a broker id without the node."""

    mode: Mode = "manual"
    paused: bool = False
    """True while an operator has stopped automatic switches for maintenance."""
    preferred: int | None = None
    """The replica that is the master when all are in sync."""
    switches: tuple[Switch, ...] = ()
    """The last switches, the oldest first."""

    @property
    def is_on(self) -> bool:
        """True if a slave may take over by itself."""
        return self.mode == "auto" and not self.paused


MANUAL = Failover()
"""A broker id without the node."""


def check_mode(mode: str) -> Mode:
    """Returns the mode. Raises ConfigError."""
    for known in MODES:
        if mode == known:
            return known
    raise ConfigError(f"failover cannot be {mode!r}", hint="It is auto or manual.")


async def read_failover(session: Session, broker_id: int, watch: Watcher | None = None) -> Failover:
    """The failover of a broker id. `watch` is called once if it changes. Raises CorruptData, ConnectionLost."""
    node = await session.get_or_none(session.paths.failover(broker_id), watch=watch)
    return Failover() if node is None else _parsed(broker_id, session.paths.failover(broker_id), node.data)


async def change_failover(
    session: Session, broker_id: int, change: Callable[[Failover], Failover], missing: Failover = MANUAL
) -> Failover:
    """Stores `change(the stored failover)` by compare-and-set, and returns it. `missing` stands for a missing node.

    Raises CorruptData, the errors of `change`, and ConnectionLost: then the outcome is unknown. `change` may be called
    several times.
    """
    path = session.paths.failover(broker_id)
    return await change_node(
        session,
        path,
        lambda data: missing if data is None else _parsed(broker_id, path, data),
        change,
        failover_json,
    )


async def begin_failover(session: Session, broker_id: int, mode: Mode) -> None:
    """Stores the mode of a broker id that has none yet. Raises ConnectionLost."""
    if await session.exists(session.paths.failover(broker_id)) is None:
        with contextlib.suppress(NodeExists):
            await session.create(session.paths.failover(broker_id), failover_json(Failover(mode)), makepath=True)


def with_switch(failover: Failover, switch: Switch) -> Failover:
    """The failover with one more switch. An epoch is recorded once, however often this is repeated."""
    others = [one for one in failover.switches if one.epoch != switch.epoch]
    return replace(failover, switches=tuple([*others, switch][-SWITCHES_KEPT:]))


def with_loss(failover: Failover, was: int, epoch: int, lost: str) -> Failover:
    """The failover with a loss noted at the switch that ended a replica's last epoch as the master.

    A loss is noted once, however often this is repeated. Raises LookupError if the switch is not listed.
    """
    ended = [one for one in failover.switches if one.was == was and one.epoch > epoch]
    if not ended:
        raise LookupError(f"no switch from replica {was} after epoch {epoch} is listed")
    first = min(ended, key=lambda one: one.epoch)
    if lost in first.lost:
        return failover
    noted = replace(first, lost="; ".join(filter(None, (first.lost, lost)))[:LOST_CHARS_MAX])
    return replace(failover, switches=tuple(noted if one is first else one for one in failover.switches))


def failover_json(failover: Failover) -> bytes:
    """The data of the node."""
    return json.dumps(asdict(failover)).encode()


def _parsed(broker_id: int, path: str, data: bytes) -> Failover:
    hint = "Delete this node, then set the mode again: `metamq ha failover`."
    return read_document(f"the failover of broker {broker_id} in ZooKeeper ({path})", data, _read, hint=hint)


def _read(document: dict[str, Any]) -> Failover:
    mode, preferred = document["mode"], document.get("preferred")
    if mode not in MODES:
        raise ValueError(f"{shown(mode)} is not a mode")
    return Failover(
        mode,
        bool(document.get("paused")),
        None if preferred is None else number(preferred),
        tuple(_switch(fields(one)) for one in items(document.get("switches", []))),
    )


def _switch(one: Any) -> Switch:
    return Switch(
        number(one["epoch"]),
        text(one["cause"]),
        number(one["was"]),
        number(one["now"]),
        number(one["at_ms"], high=FAR),
        number(one["took_ms"], high=FAR),
        bool(one["is_automatic"]),
        text(one.get("lost", "")),
    )
