"""How the removal of a broker id, or of a replica, is shown before it is done."""

from __future__ import annotations

from dataclasses import asdict

import click

from metamq.cli.show.output import count, listed, print_json, say
from metamq.client.admin.admin_model import RemovalPlan

ACCEPT_LOSS = click.option("--accept-loss", is_flag=True, help="Also when messages are lost with it.")


def removal_lines(plan: RemovalPlan, accept_loss: bool) -> list[str]:
    """The plan in sentences."""
    lines = [f"{plan.who[0].upper()}{plan.who[1:]} is removed from ZooKeeper for good."]
    if plan.in_sync:
        lines.append("It stands in the in-sync set, and is taken out.")
    if plan.forgets_slaves:
        lines.append(
            "The broker id counts as one that never had a slave, from its master's next start: it then takes writes "
            "while ZooKeeper is away. Do not remove it if another slave is only down."
        )
    if plan.offsets:
        lines.append(f"{count(plan.offsets, 'committed offset')} of groups in its partitions go with it.")
    if plan.emptied:
        lines.append(f"Topics that have no other partition are deleted: {listed(plan.emptied)}.")
    if plan.loss:
        refused = "LOST" if accept_loss else "Without --accept-loss it is refused"
        lines.append(f"{refused}: {plan.loss}.")
    return lines


def tell_removed(plan: RemovalPlan, output: str) -> None:
    """That it is done."""
    if output == "json":
        print_json(asdict(plan))
    else:
        say(f"{plan.who[0].upper()}{plan.who[1:]} is removed.")
