"""`metamq demo`."""

from __future__ import annotations

import sys

import click

from metamq.cli.command import Command


@click.command(cls=Command)
def demo() -> None:
    """Watch real data go through a real cluster.

    336,776 flights, three consumers in one group, one of them killed half way; every flight is counted once. Starts a
    ZooKeeper and a broker of its own and removes them after. Ends with status 1 when a figure differs from the data's.
    """
    from rich.console import Console

    from metamq.cli.demo import run_demo

    sys.exit(run_demo(Console()))
