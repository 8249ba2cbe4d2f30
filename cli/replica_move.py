"""Waits until a new replica of a broker id is in sync, and moves the broker id to it: `metamq ha add` and `ha move`."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from metamq.cli.context import current
from metamq.cli.show.output import say
from metamq.cli.show.progress import progress_bar
from metamq.errors import ConfigError, ConnectError, MetamqError, Timeout

if TYPE_CHECKING:
    from metamq import Admin
    from metamq.cli.show.progress import Advance
    from metamq.client.admin.admin_model import BrokerReplicas, ReplicaDescription

WAIT_S = 0.2
ROLE_CHANGE_S = 10.0
"""Time for a former master to register as a slave. Until then it may run although it is not registered."""


class ReportedWait:
    """Prints the reason for a wait, once until it changes. The wait ends at the deadline, a time.monotonic()."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self._reported = ""

    def report(self, why: str) -> None:
        if why != self._reported:
            self._reported = why
            say(f"Waiting: {why}.")

    def retry(self, error: MetamqError) -> None:
        """Prints an error, and waits a moment. Raises the error after the deadline."""
        if time.monotonic() > self.deadline:
            raise error
        self.report(error.problem)
        time.sleep(WAIT_S)

    def replicas(self, admin: Admin) -> dict[int, BrokerReplicas]:
        """Returns admin.replicas(). Waits while ZooKeeper, which answered before, does not answer."""
        while True:
            try:
                return admin.replicas()
            except ConnectError as error:
                self.retry(error)

    def pause(self, what: str, why: str, hint: str) -> None:
        """Waits a moment. Raises Timeout after the deadline."""
        if time.monotonic() > self.deadline:
            raise Timeout(f"{what} ({why})", self.limit_s, hint=hint)
        time.sleep(WAIT_S)


def wait_until_in_sync(admin: Admin, broker_id: int, replica: int, waiting: ReportedWait) -> BrokerReplicas:
    """Returns the replicas of a broker id once this one runs and is in sync. Raises ConfigError, Timeout."""
    name = f"replica {replica} of broker {broker_id}"
    with contextlib.ExitStack() as stack:
        bar, left = None, 0
        while True:
            broker, one = _replica(admin, broker_id, replica, waiting)
            if one is not None and one.learner:
                raise ConfigError(f"{name} is a learner, which is never in sync", hint="Start it without --learner.")
            if one is not None and one.holds_all:
                return broker
            if one is None or one.address is None:
                why = f"{name} does not run; start it: {_command(broker_id, replica)}"
            else:
                copying = f"{one.copying:,} partitions are copied" if one.copying else one.stage or "it has no link yet"
                why = f"{name}: {one.problem or copying}"
                bar, left = _advanced(stack, bar, left, one)
            if bar is None:
                waiting.report(why)
            waiting.pause(f"waiting for {name} in sync", why, "`metamq ha status` shows its state.")


def _advanced(
    stack: contextlib.ExitStack, bar: Advance | None, left: int, one: ReplicaDescription
) -> tuple[Advance | None, int]:
    """Moves the bar of a copy, which appears with its first lag. Returns the bar, and the bytes that are left."""
    if one.lag_bytes is None:
        return bar, left
    if bar is None:
        return stack.enter_context(progress_bar(f"Replica {one.replica}", one.lag_bytes, unit="bytes")), one.lag_bytes
    if one.lag_bytes < left:
        bar(left - one.lag_bytes)
    return bar, min(left, one.lag_bytes)


def move(admin: Admin, broker_id: int, former: int, replica: int, waiting: ReportedWait) -> None:
    """Replaces a replica by another one. Raises ConfigError, Timeout, and the errors of Admin.promote().

    Each step looks again: a master may change at any time. If a step fails, run the move again to continue.
    """
    wait_until_in_sync(admin, broker_id, replica, waiting)
    if _replica(admin, broker_id, former, waiting)[1] is None:
        say(f"ZooKeeper has nothing about replica {former} of broker {broker_id}: nothing is removed.")
        return
    changes_until_s = 0.0
    while (one := _replica(admin, broker_id, former, waiting)[1]) is not None:
        wait_until_in_sync(admin, broker_id, replica, waiting)
        if one.role != "slave":  # the master, or a former one that waits
            if one.address is not None:
                changes_until_s = time.monotonic() + ROLE_CHANGE_S
            epoch = admin.promote(broker_id, replica)
            say(f"Replica {replica} is the master of broker {broker_id}, epoch {epoch}.")
            _prefer(admin, broker_id, former, replica)
        elif one.address is not None:
            changes_until_s = 0.0
            why = f"replica {former} of broker {broker_id} is not needed any more; stop it, at {one.address}"
            waiting.report(why)
            waiting.pause(f"waiting for the end of replica {former}", why, "Stop it, and run the same command again.")
        elif time.monotonic() < changes_until_s:
            time.sleep(WAIT_S)
        else:
            _remove(admin, broker_id, former, waiting)
    say(f"Replica {former} of broker {broker_id} is removed. Replica {replica} has taken its place.")


def _prefer(admin: Admin, broker_id: int, former: int, replica: int) -> None:
    """Makes the new replica the preferred one if the former one is: it would become the master again."""
    if admin.failover(broker_id).preferred == former:
        admin.set_failover(broker_id, preferred=replica)


def _remove(admin: Admin, broker_id: int, replica: int, waiting: ReportedWait) -> None:
    try:
        admin.remove_replica(broker_id, replica)
    except ConfigError:
        if _replica(admin, broker_id, replica, waiting)[1] is not None:
            raise  # else the master has removed it from the in-sync set meanwhile


def _replica(
    admin: Admin, broker_id: int, replica: int, waiting: ReportedWait
) -> tuple[BrokerReplicas, ReplicaDescription | None]:
    found = waiting.replicas(admin)
    if broker_id not in found:
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    by_number = {one.replica: one for one in found[broker_id].replicas}
    return found[broker_id], by_number.get(replica)


def _command(broker_id: int, replica: int) -> str:
    access = current().access()
    where = f"--zookeeper {access.zookeeper} --root {access.root} --host HOST --data FOLDER"
    return f"`metamq broker --id {broker_id} --replica {replica} {where}`"
