"""`metamq delayed`: the delayed messages that wait, by broker."""

from __future__ import annotations

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.show.output import TABLE_OR_JSON, print_json, print_table
from metamq.client.model import time_of


@click.command(cls=CliCommand)
@TABLE_OR_JSON
def delayed(output: str) -> None:
    """Show how many delayed messages wait at each broker, and when the next one is due.

    The time is approximate: a message may be due a little earlier.

    \b
    metamq delayed
    metamq delayed -o json | jq 'map(.waiting) | add'
    """  # fmt: skip
    from metamq import Admin

    with Admin(**current().client()) as admin:
        found = [admin.statistics(broker_id) for broker_id, one in admin.brokers().items() if one.live]
    rows = [
        (one.broker_id, one.delayed, time_of(one.next_delayed_us).isoformat() if one.next_delayed_us else None)
        for one in found
    ]
    if output == "json":
        print_json([dict(zip(("broker", "waiting", "next_due"), row, strict=True)) for row in rows])
        return
    print_table(("BROKER", "WAITING", "NEXT DUE"), [(*row[:2], row[2] or "-") for row in rows])
