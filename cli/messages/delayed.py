"""`metamq delayed`: the delayed messages that wait, by broker."""

from __future__ import annotations

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.show.output import TABLE_OR_JSON, print_json, print_table, say
from metamq.client.model import time_of
from metamq.errors import MetamqError, NotAuthorized


@click.command(cls=CliCommand)
@TABLE_OR_JSON
def delayed(output: str) -> int:
    """Show how many delayed messages wait at each broker, and when the next one is due.

    The time is approximate: a message may be due a little earlier. The exit status is 1 if a broker does not answer.

    \b
    metamq delayed
    metamq delayed -o json | jq 'map(.waiting) | add'
    """  # fmt: skip
    rows: list[tuple[int, int | None, str | None, str]] = []
    with current().admin() as admin:
        for broker_id in admin.brokers():
            try:
                found = admin.statistics(broker_id)
            except NotAuthorized:
                raise
            except MetamqError as error:
                rows.append((broker_id, None, None, error.problem))
                say(f"The delayed messages at broker {broker_id} are unknown: {error}")
                continue
            due = time_of(found.next_delayed_us).isoformat() if found.next_delayed_us else None
            rows.append((broker_id, found.delayed, due, ""))
    if output == "json":
        print_json([dict(zip(("broker", "waiting", "next_due", "problem"), row, strict=True)) for row in rows])
    else:
        print_table(("BROKER", "WAITING", "NEXT DUE"), [row[:3] for row in rows])
    return 1 if any(row[3] for row in rows) else 0
