"""Plans and results of the removal of a broker id or a replica, as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from metamq.cli.show.output import count, listed, print_json, say

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import RemovalPlan

ACCEPT_LOSS = click.option("--accept-loss", is_flag=True, help="Remove it even if messages are lost.")


def removal_lines(plan: RemovalPlan, accept_loss: bool) -> list[str]:
    """Returns the plan in sentences."""
    lines = [f"{plan.who[0].upper()}{plan.who[1:]} will be removed from ZooKeeper permanently."]
    if plan.in_sync:
        lines.append("It is in the in-sync set, and will be removed from it.")
    if plan.forgets_slaves:
        lines.append(
            "From the master's next start the broker id counts as one that never had a slave: it then accepts writes "
            "while ZooKeeper is unreachable. If another slave is only down, do not remove this one."
        )
    if plan.offsets:
        lines.append(f"{count(plan.offsets, 'committed offset')} of groups in its partitions will be deleted.")
    if plan.emptied:
        lines.append(f"Topics that have no other partition will be deleted: {listed(plan.emptied)}.")
    if plan.loss:
        refused = "LOST" if accept_loss else "Without --accept-loss the removal is refused"
        lines.append(f"{refused}: {plan.loss}.")
    return lines


def report_removed(plan: RemovalPlan, output: str) -> None:
    """Prints the result of a removal."""
    if output == "json":
        print_json(asdict(plan))
    else:
        say(f"{plan.who[0].upper()}{plan.who[1:]} is removed.")
