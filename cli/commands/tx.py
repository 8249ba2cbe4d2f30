"""`metamq tx`: list, show, recover, commit, rollback, forget."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.show.output import (
    TABLE_OR_JSON,
    TEXT_OR_JSON,
    YES,
    confirm,
    count,
    listed,
    print_json,
    print_line,
    print_table,
    say,
)
from metamq.cli.show.units import BROKER, show_age, show_bytes
from metamq.cli.upkeep.recover import recover
from metamq.errors import BranchNotKnown, ConfigError, ConnectError
from metamq.wire.xa import XACode, Xid

STATES = ("active", "idle", "prepared", "rollback-only", "decided", "heuristically completed")

if TYPE_CHECKING:
    from metamq import Admin
    from metamq.client.admin.admin_model import OpenBranches
    from metamq.client.net.branches import BranchDescription

PREPARED, HEURISTIC, DECIDED = "prepared", "heuristically completed", "decided"
AT_BROKER = click.option(
    "--broker", "broker_id", type=BROKER, metavar="ID", help="Only the branch at this broker id.  [all]"
)


_BASE64 = "[A-Za-z0-9+/]*={0,2}"
_MAY_BE_ID = re.compile(rf"[0-9]+(_{_BASE64}){{0,2}}|([0-9a-f]{{2}})+")
"""The form of an id, of its beginning, or of a global transaction in hexadecimal."""


@click.group(cls=Group)
def tx() -> None:
    """Show transactions in doubt; commit them or roll them back.

    A branch is the part of a transaction at one broker. A prepared branch waits for its transaction manager, without a
    time limit.

    \b
    metamq tx list
    metamq tx show 19793_b3JkZXItMTc=_MA==
    metamq tx rollback 19793_b3JkZXItMTc=_MA==
    """


tx.add_command(recover)


@tx.command("list")
@click.option("--state", type=click.Choice(STATES, case_sensitive=False), help="Only branches in this state.")
@TABLE_OR_JSON
def list_branches(state: str | None, output: str) -> int:
    """List the open branches: first the prepared ones, the oldest first.

    AGE is the time since a branch was prepared or decided. OWNER is the host, process and session that began the
    branch. The exit status is 1 if a broker does not answer.

    \b
    metamq tx list
    metamq tx list --state prepared -o json | jq '.[] | select(.age_s > 600)'
    """
    with current().admin() as admin:
        found = admin.transactions()
    branches = [one for one in found.branches if state in (None, one.state)]
    branches.sort(key=lambda one: (not one.prepared_us, one.prepared_us, one.xid, one.broker_id))
    if output == "json":
        print_json([_json(one) for one in branches])
    else:
        headings = ["XID", "BROKER", "STATE", "AGE", "MESSAGES", "BYTES", "OWNER"]
        print_table(headings, [_row(one) for one in branches])
    for broker_id, problem in found.problems.items():
        say(f"The branches at broker {broker_id} are unknown: {problem}")
    return 1 if found.problems else 0


def _row(one: BranchDescription) -> list[object]:
    age = show_age(age_ms(one)) if one.prepared_us else None
    return [str(one.xid), str(one.broker_id), one.state, age, one.messages, show_bytes(one.bytes), one.owner]


def age_ms(one: BranchDescription) -> int:
    """Returns the milliseconds since a branch was prepared or decided."""
    return max(time.time_ns() // 1_000_000 - one.prepared_us // 1000, 0)


def _json(one: BranchDescription) -> dict[str, Any]:
    return {
        "xid": str(one.xid),
        "format_id": one.xid.format_id,
        "gtrid": one.xid.gtrid.hex(),
        "bqual": one.xid.bqual.hex(),
        "broker_id": one.broker_id,
        "state": one.state,
        "age_s": age_ms(one) / 1000 if one.prepared_us else None,
        "messages": one.messages,
        "bytes": one.bytes,
        "owner": one.owner,
        "history": one.history,
        "follows": one.follows,
        "followers": list(one.followers),
        "decides": who_decides(one),
    }


@tx.command()
@click.argument("xid")
@TEXT_OR_JSON
def show(xid: str, output: str) -> None:
    """Show the branches of a transaction, the process that decides it, and the next step.

    XID is an id that `metamq tx list` or an error prints, or the beginning of an id. It may also be only the global
    transaction: as text, or in hexadecimal as in the outcome table of dbtx.

    \b
    metamq tx show 19793_b3JkZXItMTc=_MA==
    metamq tx show 19793_b3JkZXItMTc=_MA== -o json
    """
    with current().admin() as admin:
        found, problems = _find(admin, xid)
    if output == "json":
        print_json([_json(one) for one in found])
        return
    first = found[0]
    is_one = len({one.xid for one in found}) == 1
    lines = [str(first.xid) if is_one else first.xid.whole]
    lines.append(f"  global transaction {_readable(first.xid.gtrid)}{_branch(first) if is_one else ''}")
    for one in found:
        amount = f"{count(one.messages, 'message')}, {show_bytes(one.bytes)}"
        age = f", for {show_age(age_ms(one))}" if one.prepared_us else ""
        which = "" if is_one else _branch(one)
        lines.append(f"  broker {one.broker_id}{which}: {one.state}{age}; {amount}; begun by {one.owner}")
    lines.append(f"  decided by: {who_decides(first)}")
    for line in lines:
        print_line(line)
    for number in problems:
        say(f"Broker {number} cannot be asked: it may have another branch of the transaction.")
    for line in next_steps(first):
        say(line)


def _branch(one: BranchDescription) -> str:
    return f", branch {_readable(one.xid.bqual) or '-'}"


def _readable(part: bytes) -> str:
    text = part.decode("ascii", "replace")
    return text if text.isprintable() and "\ufffd" not in text else part.hex()


def who_decides(one: BranchDescription) -> str:
    """Describes the process that decides a branch, as far as the id shows it."""
    gtrid = one.xid.gtrid
    if one.state == HEURISTIC:
        return "an operator, who has decided"
    if one.state == DECIDED:
        return f"this broker, which has decided; broker {listed([str(each) for each in one.followers])} follows"
    if one.follows is not None:
        return f"broker {one.follows}, which this broker asks"
    if gtrid.startswith(b"db:"):
        return f"the database whose outcome table is {gtrid.split(b':')[1].decode('ascii', 'replace')} (dbtx)"
    if gtrid.startswith(b"co-"):
        return f"the Coordinator whose log is {gtrid.split(b'-')[1].decode('ascii', 'replace')}"
    if gtrid.startswith(b"local:"):
        return "its client"
    if gtrid.startswith(b"spark:") and gtrid.count(b":") == 2:
        _prefix, sink, batch = gtrid.decode("ascii", "replace").split(":")
        what = "the batch write" if sink.startswith("job-") else f"batch {batch} of the streaming query, or sink,"
        return f"the driver of Spark, for {what} {sink}"
    return "its transaction manager"


def next_steps(one: BranchDescription) -> list[str]:
    """Returns the next steps for a branch, in sentences."""
    if one.state == HEURISTIC:
        return [
            "The broker keeps it until its transaction manager has received the decision and forgets it, or until "
            "`metamq tx forget`."
        ]
    if one.state == DECIDED:
        return ["Do nothing: the broker reports the decision to the brokers that follow, then forgets it."]
    if one.state != PREPARED:
        return [
            "Do nothing: a branch that is not prepared is rolled back at its time-out. To end it sooner, use "
            "`metamq tx rollback`."
        ]
    if one.follows is not None:
        return [f"Do nothing while broker {one.follows} can be reached: the brokers end it."]
    gtrid = one.xid.gtrid
    if gtrid.startswith(b"db:"):
        return ["Run `metamq tx recover`, or a Recoverer, on that database: it reads the decision.", _LAST]
    if gtrid.startswith(b"co-"):
        return ["Start that Coordinator again: it reads its log.", _LAST]
    if gtrid.startswith(b"spark:job-"):
        return [
            "The next exactly-once batch write of Spark ends it, if it was decided or if its own write is over. If its "
            "driver died earlier, a batch write ends it from two days after its last task began.",
            _LAST,
        ]
    if gtrid.startswith(b"spark:"):
        return ["Start that query again: its next batch with rows ends it.", _LAST]
    return ["Start its transaction manager again: it recovers prepared branches.", _LAST]


_LAST = "Only if that is lost permanently, decide yourself: `metamq tx commit` or `metamq tx rollback`."


def _find(admin: Admin, text: str) -> tuple[list[BranchDescription], list[int]]:
    """Returns the branches of one transaction, and the brokers that could not be asked.

    The text is an id, a global transaction, or the beginning of one id. Raises BranchNotKnown, ConfigError if several
    transactions begin with the text, ConnectError.
    """
    found = admin.transactions()
    matching = _exact(found, text) or _beginning(found, text)
    _check_one(matching, text)
    if not matching:
        _raise_unknown(text, None, found.problems, (), ())
    return matching, list(found.problems)


def _find_to_decide(admin: Admin, text: str, broker_id: int | None) -> list[BranchDescription]:
    """Returns the branches of a full id or global transaction, at one broker or at all.

    Raises the errors of _find(); ConnectError also if a broker that could not be asked may have another branch.
    """
    if broker_id is not None and broker_id not in admin.brokers():
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    found = admin.transactions()
    everywhere = _exact(found, text)
    matching = [one for one in everywhere if broker_id in (None, one.broker_id)]
    _check_one(matching, text)
    problems = [number for number in found.problems if broker_id in (None, number)]
    if problems or not matching:
        similar = () if everywhere else _beginning(found, text)
        _raise_unknown(text, broker_id, problems, similar, sorted({one.broker_id for one in everywhere}))
    return matching


def _exact(found: OpenBranches, text: str) -> list[BranchDescription]:
    """Returns the branches of that id, or else of that global transaction."""
    if not text:
        raise ConfigError("no transaction id was given", hint="`metamq tx list` shows the open branches.")
    return [one for one in found.branches if str(one.xid) == text] or [
        one
        for one in found.branches
        if text in (one.xid.whole, one.xid.gtrid.hex(), one.xid.gtrid.decode("ascii", "replace"))
    ]


def _beginning(found: OpenBranches, text: str) -> list[BranchDescription]:
    return [one for one in found.branches if str(one.xid).startswith(text)]


def _check_one(branches: Sequence[BranchDescription], text: str) -> None:
    names = sorted({one.xid.whole for one in branches})
    if len(names) > 1:
        raise ConfigError(f"{len(names)} transactions begin with {text!r}", hint=f"They are: {listed(names)}.")


def _raise_unknown(
    text: str,
    broker_id: int | None,
    problems: Collection[int],
    similar: Sequence[BranchDescription],
    having: Sequence[int],
) -> NoReturn:
    """Raises the error for a transaction that is not found. `having`: brokers that answered and have exactly it."""
    options = listed([f"`--broker {number}`" for number in having])
    is_at = f"It is open at broker {listed([str(number) for number in having])}" if having else ""
    unasked = listed([str(number) for number in problems])
    if not having and not similar and not _MAY_BE_ID.fullmatch(text):
        hint = "`metamq tx list` prints ids. No open transaction has this name either."
        if problems:
            hint += f" Broker {unasked} cannot be asked."
        raise ConfigError(f"{text!r} is not a transaction id", hint=hint)
    if problems:
        hint = "Nothing was done. Try again later, or give --broker to choose the branch at one broker."
        if having:
            hint = f"Nothing was done. {is_at}: give {options} to choose that branch, or try again later."
        raise ConnectError(f"broker {unasked}", f"it may have {text}", hint=hint)
    where = "any broker" if broker_id is None else f"broker {broker_id}"
    hint = "`metamq tx list` shows the open branches, and no finished ones."
    if having:
        hint = f"{is_at}: give {options}."
    elif similar:
        names = sorted({one.xid.whole for one in similar})
        hint = f"{listed(names)} {'begins' if len(names) == 1 else 'begin'} with it: give the full id to decide."
    raise BranchNotKnown(text, XACode.NOTA, f"it is not open at {where}", hint=hint)


@tx.command()
@click.argument("xid")
@AT_BROKER
@YES
@TEXT_OR_JSON
def commit(xid: str, broker_id: int | None, yes: bool, output: str) -> None:
    """Commit a prepared transaction, instead of its transaction manager.

    Consumers then see its messages. If the manager decides otherwise, one part of the transaction is committed and
    another is rolled back. So commit only if the manager is lost, or reports that it has committed. The manager
    receives the decision when it asks.

    XID is a full id, or a global transaction as for `metamq tx show`. If a broker does not answer, give --broker:
    without it the command does nothing.

    \b
    metamq tx commit 19793_b3JkZXItMTc=_MA==
    metamq tx commit 19793_b3JkZXItMTc=_MA== --broker 0 --yes
    """
    _decide(xid, broker_id, yes, output, "commit")


@tx.command()
@click.argument("xid")
@AT_BROKER
@YES
@TEXT_OR_JSON
def rollback(xid: str, broker_id: int | None, yes: bool, output: str) -> None:
    """Roll back a transaction, instead of its transaction manager.

    Consumers never see its messages. The rules of `metamq tx commit` apply. A branch that is not prepared may always be
    rolled back: its client then gets an error.

    \b
    metamq tx rollback 19793_b3JkZXItMTc=_MA==
    """
    _decide(xid, broker_id, yes, output, "rollback")


@tx.command()
@click.argument("xid")
@AT_BROKER
@YES
@TEXT_OR_JSON
def forget(xid: str, broker_id: int | None, yes: bool, output: str) -> None:
    """Delete the record of a decision: its transaction manager can then no longer ask for it.

    \b
    metamq tx forget 19793_b3JkZXItMTc=_MA==
    """
    _decide(xid, broker_id, yes, output, "forget")


_ALLOWED = {"commit": (PREPARED,), "rollback": (PREPARED, "active", "idle", "rollback-only")}
_ALLOWED["forget"] = (HEURISTIC, DECIDED)
_DONE = {"commit": "committed", "rollback": "rolled back", "forget": "forgotten"}


def _decide(text: str, broker_id: int | None, yes: bool, output: str, what: str) -> None:
    with current().admin() as admin:
        found = _find_to_decide(admin, text, broker_id)
        wrong = [one for one in found if one.state not in _ALLOWED[what]]
        if wrong:
            states = listed([f"{one.state} at broker {one.broker_id}" for one in wrong])
            raise ConfigError(f"transaction {wrong[0].xid} is {states}: {what} is not possible", hint=_hint(what))
        calls: dict[str, Callable[[Xid, int], None]] = {
            "commit": admin.commit_branch, "rollback": admin.rollback_branch, "forget": admin.forget_branch,
        }  # fmt: skip
        confirm(_plan(found, what), yes=yes)
        for one in found:
            calls[what](one.xid, one.broker_id)
            say(f"Branch {one.xid} at broker {one.broker_id} is {_DONE[what]}.")
    if output == "json":
        print_json([{"xid": str(one.xid), "broker_id": one.broker_id, "outcome": _DONE[what]} for one in found])


def _hint(what: str) -> str:
    if what == "forget":
        return "Only a decision can be forgotten. `metamq tx show` shows the next step."
    return "`metamq tx show` shows the next step. With --broker you choose the branch at one broker."


def _plan(found: Sequence[BranchDescription], what: str) -> list[str]:
    lines = []
    for one in found:
        age = f", for {show_age(age_ms(one))}" if one.prepared_us else ""
        amount = f"{count(one.messages, 'message')}, {show_bytes(one.bytes)}"
        lines.append(f"Broker {one.broker_id}: {one.state}{age}; {amount}; begun by {one.owner}.")
    if what == "forget":
        for one in found:
            if one.followers:
                where = listed([str(number) for number in one.followers])
                lines.append(
                    f"First check that it is committed at broker {where}: a branch that is not committed there will be "
                    "rolled back."
                )
        return [*lines, "The decision will be deleted: its transaction manager can no longer ask for it."]
    lines.append("Consumers will see its messages." if what == "commit" else "Consumers will never see its messages.")
    if any(one.state == PREPARED for one in found):
        lines.append(
            f"It is decided by: {who_decides(found[0])}. If that decides otherwise, one part of the transaction is "
            "committed and another is rolled back."
        )
    return lines
