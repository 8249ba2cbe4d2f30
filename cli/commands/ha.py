"""`metamq ha`: status, wait, promote, remove, failover, pause, resume, history, balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.removal import ACCEPT_LOSS, removal_lines, report_removed
from metamq.cli.replica_move import ReportedWait, wait_until_in_sync
from metamq.cli.replica_move import move as move_to
from metamq.cli.show.output import (
    TABLE_OR_JSON,
    TEXT_OR_JSON,
    YES,
    confirm,
    count,
    listed,
    print_json,
    print_table,
    say,
)
from metamq.cli.show.replica_view import damage_faults, in_sync_and_down, replica_faults, state_in_words
from metamq.cli.show.units import BROKER, DURATION, show_bytes
from metamq.errors import ConfigError, ConnectError
from metamq.zk.cluster.failover import MODES
from metamq.zk.paths import Paths
from metamq.zk.servers import parse_servers

if TYPE_CHECKING:
    from metamq import Admin
    from metamq.client.admin.admin_model import BrokerReplicas, MasterPlace, PromotionPlan, ReplicaDescription
    from metamq.zk.cluster.failover import Failover

HEADINGS = [
    "BROKER", "REPLICA", "ROLE", "STATE", "ADDRESS", "IN SYNC", "MESSAGES BEHIND", "BYTES", "SECONDS", "EPOCH",
    "IF THE MASTER ENDS",
]  # fmt: skip
WAIT_HINT = "`metamq ha status` shows each replica. With --broker the command waits for one broker only."


@click.group(cls=Group)
def ha() -> None:
    """Show masters and slaves, and promote a slave.

    \b
    metamq ha status
    metamq ha wait --in-sync 2
    metamq ha promote --broker 0 --slave 1
    metamq ha remove --broker 0 --replica 2
    metamq ha failover --broker 0 auto
    metamq ha history
    metamq ha balance
    """


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", help="Only this broker id.  [all]")
@TABLE_OR_JSON
def status(broker_id: int | None, output: str) -> int:
    """Show each broker's replicas: roles, the in-sync set, how far slaves are behind their master.

    STATE is up, down (not registered), silent (a registered master that left two requests unanswered), or catching up
    (a slave that copies data, with an estimate by its speed of the last second). IN SYNC is the value in ZooKeeper,
    even for a replica that is down. IF THE MASTER ENDS shows the replica that takes over by itself, or why none does.
    If there are faults, the command prints them and their repair on standard error, and the exit status is 1. It does
    not show a replica that is neither in sync nor running. With -o json, `status` is the address of its /metrics.

    \b
    metamq ha status
    metamq ha status -o json | jq '.[].replicas[] | select(.in_sync | not)'
    """
    with current().admin() as admin:
        replicas = admin.replicas()
    if broker_id is not None and broker_id not in replicas:
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    found = list(replicas.values()) if broker_id is None else [replicas[broker_id]]
    if output == "json":
        print_json([_json(one) for one in found])
    else:
        print_table(HEADINGS, [_row(broker, replica) for broker in found for replica in broker.replicas])
    faults = [fault for broker in found for fault in (*replica_faults(broker), *damage_faults(broker))]
    for fault in faults:
        say(f"{fault.what}: {fault.detail}")
        if fault.hint:
            say(f"  {fault.hint}")
    return 1 if faults else 0


def _json(broker: BrokerReplicas) -> dict[str, Any]:
    described = asdict(broker)
    described["replicas"] = [{**asdict(one), "state": one.state} for one in broker.replicas]
    return described


def _row(broker: BrokerReplicas, replica: ReplicaDescription) -> list[object]:
    return [
        str(broker.broker_id),
        str(replica.replica),
        "learner" if replica.learner and replica.role == "slave" else replica.role,
        state_in_words(replica),
        replica.address,
        "yes" if replica.in_sync else "never" if replica.learner else replica.stage or "no",
        replica.lag_messages,
        None if replica.lag_bytes is None else show_bytes(replica.lag_bytes),
        None if replica.lag_ms is None else f"{replica.lag_ms / 1000:.1f}",
        str(broker.epoch),
        _if_the_master_ends(broker, replica),
    ]


def _if_the_master_ends(broker: BrokerReplicas, replica: ReplicaDescription) -> str | None:
    if replica.replica == broker.successor:
        return f"takes over later: {broker.successor_waits}" if broker.successor_waits else "takes over"
    return f"no replica takes over: {broker.no_successor}" if replica.role == "master" and broker.no_successor else None


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", help="Only this broker id.  [all]")
@click.option(
    "--in-sync", "wanted", type=click.IntRange(1), default=2, show_default=True, help="Replicas that must be in sync."
)
@click.option("--limit", "limit_ms", type=DURATION, default="60s", show_default=True, help="Give up after this time.")
@TEXT_OR_JSON
def wait(broker_id: int | None, wanted: int, limit_ms: int, output: str) -> int:
    """Wait until enough replicas of each broker, the master included, run and are in sync.

    For scripts: run it between two steps of a rolling restart, and before a promotion. It ends with status 1 after the
    time of --limit. With -o json it prints the same as `metamq ha status`.

    \b
    metamq ha wait --in-sync 2
    metamq ha wait --broker 0 --in-sync 3 --limit 10m
    """
    waiting = ReportedWait(limit_ms / 1000)
    with _admin_of_a_cluster(waiting) as admin:
        while True:
            found = waiting.replicas(admin)
            asked = found if broker_id is None else {broker_id: found[broker_id]} if broker_id in found else {}
            lacking = [one for one in asked.values() if not _is_in_sync(one, wanted)]
            if asked and not lacking:
                break
            if not asked:
                why = "no broker was ever started" if broker_id is None else f"broker {broker_id} was never started"
            else:
                why = "; ".join(_shortage(one, wanted) for one in lacking)
            waiting.report(why)
            waiting.pause(f"waiting for {count(wanted, 'replica')} in sync", why, WAIT_HINT)
    if output == "json":
        print_json([_json(one) for one in asked.values()])
    else:
        verb = "is" if wanted == 1 else "are"
        say(f"{count(wanted, 'replica')} of {_brokers(asked)} {verb} in sync.")
    return 0


def _admin_of_a_cluster(waiting: ReportedWait) -> Admin:
    """Waits for ZooKeeper, and for the first broker. Raises ConfigError, ConnectError at the deadline."""
    access = current().access()
    parse_servers(access.zookeeper)  # a wrong address or root raises at once: waiting does not repair it
    Paths(access.root)
    while True:
        try:
            return current().admin()
        except (ConfigError, ConnectError) as error:
            waiting.retry(error)


def _shortage(broker: BrokerReplicas, wanted: int) -> str:
    """Describes one broker: "broker 0 has 1 of 2 replicas in sync (replica 0), replica 1 is down"."""
    has_master = any(one.holds_all for one in broker.replicas if one.role == "master")
    ready = (one for one in broker.replicas if (one.holds_all if has_master else one.in_sync and one.address))
    running = [str(one.replica) for one in ready]
    who = f" (replica {listed(running)})" if running else ""
    rest = ""
    for one in broker.replicas:
        if str(one.replica) not in running:
            state = "down" if one.address is None else one.stage or "not linked to the master"
            rest += f", replica {one.replica}{' (the master)' if one.role == 'master' else ''} is {state}"
    return f"broker {broker.broker_id} has {len(running)} of {count(wanted, 'replica')} in sync{who}{rest}"


def _is_in_sync(broker: BrokerReplicas, wanted: int) -> bool:
    running = [one for one in broker.replicas if one.holds_all]
    return len(running) >= wanted and any(one.role == "master" for one in running)


def _brokers(found: Iterable[int]) -> str:
    return f"broker {listed([str(number) for number in sorted(found)])}"


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", default=0, show_default=True, help="The broker id.")
@click.option("--slave", "replica", type=int, required=True, help="The replica number of the next master.")
@click.option(
    "--accept-loss", is_flag=True, help="Promote it even if it is not in sync: messages that it lacks are lost."
)
@YES
@TEXT_OR_JSON
def promote(broker_id: int, replica: int, accept_loss: bool, yes: bool, output: str) -> None:
    """Make a slave the master of its broker id, without a restart.

    A running master hands over to a slave that is in sync, and becomes a slave. A master that is down becomes a slave
    when it starts again. Producers and consumers find the new master by themselves.

    \b
    metamq ha promote --broker 0 --slave 1
    metamq ha promote --broker 0 --slave 1 --accept-loss
    """
    with current().admin() as admin:
        plan = admin.plan_promotion(broker_id, replica)
        confirm(_plan_lines(plan, accept_loss), yes=yes)
        epoch = admin.promote(broker_id, replica, accept_loss=accept_loss)
    if output == "json":
        print_json({"broker_id": broker_id, "master": replica, "epoch": epoch})
        return
    say(f"Replica {replica} is the master of broker {broker_id}, epoch {epoch}.")


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", default=0, show_default=True, help="The broker id.")
@click.option("--replica", type=int, required=True, help="The replica number of the lost slave.")
@ACCEPT_LOSS
@YES
@TEXT_OR_JSON
def remove(broker_id: int, replica: int, accept_loss: bool, yes: bool, output: str) -> None:
    """Remove a slave that is lost permanently.

    It leaves the in-sync set. When the last slave of a broker id is removed, the broker id counts as one that never had
    a slave. The command refuses a replica that runs. It also refuses the master: promote another replica first. To
    remove a whole broker id, use `metamq cluster remove-broker`.

    \b
    metamq ha remove --broker 0 --replica 1
    """
    with current().admin() as admin:
        plan = admin.plan_removal(broker_id, replica)
        confirm(removal_lines(plan, accept_loss), yes=yes)
        admin.remove_replica(broker_id, replica, accept_loss=accept_loss)
    report_removed(plan, output)


_LIMIT = click.option(
    "--limit", "limit_ms", type=DURATION, default="1h", show_default=True, help="Give up after this time."
)


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", default=0, show_default=True, help="The broker id.")
@click.option("--replica", type=int, required=True, help="The number of the new replica.")
@_LIMIT
@TEXT_OR_JSON
def add(broker_id: int, replica: int, limit_ms: int, output: str) -> None:
    """Add a replica to a broker id: wait until it runs and is in sync, with progress.

    Start the replica on its machine, before or after this command; the command prints how. With -o json it prints the
    same as `metamq ha status`.

    \b
    metamq ha add --broker 0 --replica 2
    """
    with current().admin() as admin:
        broker = wait_until_in_sync(admin, broker_id, replica, ReportedWait(limit_ms / 1000))
    if output == "json":
        print_json(_json(broker))
    else:
        say(f"Replica {replica} of broker {broker_id} is in sync.")


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", default=0, show_default=True, help="The broker id.")
@click.option("--from", "former", type=int, required=True, help="The replica to replace.")
@click.option("--to", "replica", type=int, required=True, help="The new replica.")
@_LIMIT
@YES
@TEXT_OR_JSON
def move(broker_id: int, former: int, replica: int, limit_ms: int, yes: bool, output: str) -> None:
    """Move a broker id from one replica to another one, while clients continue.

    Start the new replica on its machine; the command prints how. When it is in sync, a master hands over to it. Then
    stop the former replica: the command waits for its end, and removes it. If the command is interrupted, run it again.

    \b
    metamq ha move --broker 0 --from 0 --to 2
    """
    if former == replica:
        raise click.UsageError("--from and --to are the same replica")
    plan = [
        f"Replica {replica} of broker {broker_id} will get all data. If replica {former} is the master, it hands over.",
        f"You then stop replica {former}, and it is removed from the in-sync set permanently.",
    ]
    with current().admin() as admin:
        confirm(plan, yes=yes)
        move_to(admin, broker_id, former, replica, ReportedWait(limit_ms / 1000))
    if output == "json":
        print_json({"broker_id": broker_id, "from": former, "to": replica})


FAILOVER_HEADINGS = ["BROKER", "FAILOVER", "MASTER", "PREFERRED", "NEXT", "WHY NONE"]
HISTORY_HEADINGS = ["TIME", "BROKER", "EPOCH", "FROM", "TO", "TOOK", "CAUSE", "GIVEN UP"]


@ha.command()
@click.argument("mode", type=click.Choice(MODES), required=False)
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", help="Only this broker id.  [all]")
@click.option(
    "--preferred",
    type=int,
    help="The replica that becomes the master again after --failover-return (2m) in sync, with auto; -1: none.",
)
@TABLE_OR_JSON
def failover(mode: str | None, broker_id: int | None, preferred: int | None, output: str) -> None:
    """Show or set the failover of brokers: auto or manual.

    auto: if the master ends, an in-sync slave takes over by itself, without a loss of acknowledged messages of topics
    with replication sync. manual: an operator promotes a slave. NEXT is the replica that would take over now.

    \b
    metamq ha failover
    metamq ha failover --broker 0 auto
    metamq ha failover --broker 0 --preferred 1
    """
    if preferred is not None and broker_id is None:
        raise click.UsageError("--preferred needs --broker: replicas of two broker ids are not the same")
    _change_failover(broker_id, output, mode=mode, preferred=preferred)


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", help="Only this broker id.  [all]")
@TABLE_OR_JSON
def pause(broker_id: int | None, output: str) -> None:
    """Stop automatic switches for maintenance. `metamq ha resume` allows them again.

    \b
    metamq ha pause --broker 0
    """
    _change_failover(broker_id, output, paused=True)


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", help="Only this broker id.  [all]")
@TABLE_OR_JSON
def resume(broker_id: int | None, output: str) -> None:
    """Allow automatic switches again, after `metamq ha pause`.

    \b
    metamq ha resume --broker 0
    """
    _change_failover(broker_id, output, paused=False)


def _change_failover(
    broker_id: int | None,
    output: str,
    *,
    mode: str | None = None,
    paused: bool | None = None,
    preferred: int | None = None,
) -> None:
    with current().admin() as admin:
        wanted = sorted(admin.replicas()) if broker_id is None else [broker_id]
        if mode is None and paused is None and preferred is None:
            set_for = {one: admin.failover(one) for one in wanted}
        else:
            set_for = {one: admin.set_failover(one, mode=mode, paused=paused, preferred=preferred) for one in wanted}
        found = {number: one for number, one in admin.replicas().items() if number in set_for}
    if output == "json":
        print_json([{"broker_id": one, **_without_switches(set_for[one]), **_next_json(found[one])} for one in found])
        return
    rows = [
        [
            str(number),
            one.failover,
            str(next(replica.replica for replica in one.replicas if replica.role != "slave")),
            set_for[number].preferred,
            one.successor,
            one.no_successor or None,
        ]
        for number, one in found.items()
    ]
    print_table(FAILOVER_HEADINGS, rows)


def _without_switches(found: Failover) -> dict[str, Any]:
    return {"mode": found.mode, "paused": found.paused, "preferred": found.preferred}


def _next_json(broker: BrokerReplicas) -> dict[str, Any]:
    return {"successor": broker.successor, "no_successor": broker.no_successor}


@ha.command()
@click.option("--broker", "broker_id", type=BROKER, metavar="ID", help="Only this broker id.  [all]")
@TABLE_OR_JSON
def history(broker_id: int | None, output: str) -> None:
    """Show the last switches of masters, the newest last: when, from which replica to which, and why.

    TOOK is the time from the moment at which the new master noticed the cause until it took writes. TIME is by the
    clock of the new master.

    \b
    metamq ha history
    metamq ha history --broker 0 -o json
    """
    with current().admin() as admin:
        wanted = sorted(admin.replicas()) if broker_id is None else [broker_id]
        switches = [(number, one) for number in wanted for one in admin.failover(number).switches]
    switches.sort(key=lambda found: found[1].at_ms)
    if output == "json":
        print_json([{"broker_id": number, **asdict(one)} for number, one in switches])
        return
    rows = [
        [
            f"{datetime.fromtimestamp(one.at_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S %z}",
            str(number),
            str(one.epoch),
            str(one.was),
            str(one.now),
            f"{one.took_ms / 1000:.2f} s",
            one.cause,
            one.lost or None,
        ]
        for number, one in switches
    ]
    print_table(HISTORY_HEADINGS, rows)


@ha.command()
@YES
@TEXT_OR_JSON
def balance(yes: bool, output: str) -> None:
    """Spread the masters over the hosts, as evenly as the replicas that are in sync allow.

    Each master that moves hands over: nothing is lost. The masters also become the preferred replicas. So with failover
    auto they return by themselves, two minutes after they are in sync again. A broker id without a master that answers
    is left out. After an error run the command again.

    \b
    metamq ha balance
    metamq ha balance --yes
    """
    with current().admin() as admin:
        places = admin.plan_balance()
        changing = [one for one in places if one.moves or admin.failover(one.broker_id).preferred != one.replica]
        if changing:
            confirm(_balance_lines(places, changing), yes=yes)
        for done, place in enumerate(changing, start=1):
            if place.moves:
                admin.promote(place.broker_id, place.replica)
            # Not before: with failover auto the preferred replica would take over by itself.
            admin.set_failover(place.broker_id, preferred=place.replica)
            what = f"Replica {place.replica} at {place.host} is the master of broker {place.broker_id}, and preferred"
            say(f"{what} ({done} of {len(changing)}).")
    if output == "json":
        print_json([asdict(place) for place in places])
    else:
        say(f"Masters: {_spread(place.host for place in places)}.")


def _balance_lines(places: list[MasterPlace], changing: list[MasterPlace]) -> list[str]:
    lines = []
    for one in changing:
        where = f"replica {one.replica} at {one.host}"
        moves = f"the master moves from replica {one.former} at {one.former_host} to {where}, which becomes preferred"
        lines.append(f"Broker {one.broker_id}: {moves if one.moves else f'{where}, its master, becomes preferred'}.")
    now, then = _spread(one.former_host for one in places), _spread(one.host for one in places)
    return [*lines, f"Masters now: {now}. Then: {then}."]


def _spread(hosts: Iterable[str]) -> str:
    return ", ".join(f"{masters} at {host}" for host, masters in sorted(Counter(hosts).items())) or count(0, "broker")


def _plan_lines(plan: PromotionPlan, accept_loss: bool) -> list[str]:
    state = "which runs and " + ("hands over" if plan.in_sync else "does not hand over")
    state = state if plan.master_lives else "which is down, or hangs"
    former = f"in place of replica {plan.master}, {state}" if plan.master != plan.replica else "again"
    lines = [f"Replica {plan.replica} will be the master of broker {plan.broker_id} {former}."]
    if plan.in_sync and plan.master_lives:
        return [*lines, "It is in sync: nothing is lost."]
    if plan.in_sync:
        lines.append("It is in sync: topics with replication sync lose no acknowledged message.")
        return [*lines, "Other topics may lose messages that it has not copied yet."]
    what = "a learner, which is never in sync" if plan.learner else "not in sync"
    refused = "" if accept_loss else ": without --accept-loss the promotion is refused"
    lines.append(f"It is {what}{refused}.")
    if plan.in_sync_and_down:
        lines.append(in_sync_and_down(plan.in_sync_and_down))
    if plan.lost is None:
        lines.append(f"The loss is unknown: {plan.unknown}.")
        if plan.promote_instead is not None and plan.promote_instead == plan.master and plan.master_lives:
            lines.append(f"Replica {plan.master} is the master and runs: wait until replica {plan.replica} is in sync.")
        elif plan.promote_instead is not None:
            lines.append(f"Start replica {plan.promote_instead}. If it runs, promote it instead.")
    elif not plan.lost:
        lines.append("At present it has all messages of the replicas that answer.")
    for topic, messages in (plan.lost or {}).items():
        lines.append(f"{'LOST' if accept_loss else 'It would lose'}: {count(messages, 'message')} of topic {topic}.")
    return lines
