"""The administration of transaction branches: the open ones, and an operator's decisions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from metamq.client.admin.admin_model import OpenBranches
from metamq.client.net.branches import ANSWER_S, Branch, BranchDescription, TxClient, new_session
from metamq.errors import BranchMisuse, BranchNotKnown, ConfigError, MetamqError
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient

LASTING = ("prepared", "heuristically completed", "decided")


async def open_branches(cluster: ClusterClient) -> OpenBranches:
    """Returns the branches of every broker, and the reasons of brokers without an answer. Raises ConnectionLost."""
    numbers = await cluster.broker_ids()
    client = TxClient(cluster)
    answers = await asyncio.gather(
        *(client.branches(number, all_of_them=True) for number in numbers), return_exceptions=True
    )
    found: list[BranchDescription] = []
    problems: dict[int, str] = {}
    for number, answer in zip(numbers, answers, strict=True):
        if isinstance(answer, MetamqError):
            problems[number] = answer.problem
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found += answer
    return OpenBranches(tuple(found), problems)


async def commit_branch(cluster: ClusterClient, xid: Xid, broker_id: int) -> None:
    """Commits a branch for an operator. Raises the broker's error."""
    branch = await _find(cluster, xid, broker_id)
    if branch.state != "prepared":
        raise BranchMisuse(
            xid, XACode.PROTO, f"it is {branch.state} at broker {broker_id}",
            hint="Only a prepared branch can be committed: it is complete then.",
        )  # fmt: skip
    await _ask(cluster, branch, Verb.HEURISTIC_COMMIT)


async def rollback_branch(cluster: ClusterClient, xid: Xid, broker_id: int) -> None:
    """Rolls a branch back for an operator. Raises the broker's error."""
    branch = await _find(cluster, xid, broker_id)
    if branch.state in LASTING:
        await _ask(cluster, branch, Verb.HEURISTIC_ROLLBACK)
        return
    try:
        await _ask(cluster, branch, Verb.RESOLVE)  # the session that works in it notices; there is nothing to forget
    except BranchNotKnown:
        return
    raise BranchMisuse(xid, XACode.PROTO, f"it was committed at broker {broker_id} meanwhile")


async def forget_branch(cluster: ClusterClient, xid: Xid, broker_id: int) -> None:
    """Drops a decision. Raises the broker's error."""
    await _ask(cluster, await _find(cluster, xid, broker_id), Verb.FORGET)


async def _find(cluster: ClusterClient, xid: Xid, broker_id: int) -> BranchDescription:
    if broker_id not in await cluster.broker_ids():
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    for branch in await TxClient(cluster).branches(broker_id, all_of_them=True):
        if branch.xid == xid.check():
            return branch
    reason = f"broker {broker_id} does not know it: it never existed, or is finished"
    raise BranchNotKnown(xid, XACode.NOTA, reason, hint="`metamq tx list` shows the open branches.")


async def _ask(cluster: ClusterClient, description: BranchDescription, verb: Verb) -> None:
    branch = Branch(description.xid, description.broker_id, new_session())
    branch.epoch = description.epoch
    await TxClient(cluster).ask(branch, [verb], timeout_s=ANSWER_S)
