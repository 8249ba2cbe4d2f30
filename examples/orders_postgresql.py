"""A small and complete shop with PostgreSQL: an order is a row and a message, both or neither.

    python orders_postgresql.py setup                     once: makes the tables and the topic
    python orders_postgresql.py order tea 3               a row in `orders`, and a message to the topic `orders`
    python orders_postgresql.py ship                      reads the messages; ships each order once
    python orders_postgresql.py recover                   a service: finishes the transactions of a crash

--database is a connection string of psycopg ("host=... dbname=..."); PGHOST and similar variables also work.
METAMQ_ZOOKEEPER is ZooKeeper's address. Needs `pip install . "psycopg[binary]"`, in a checkout.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

import psycopg

from metamq import Admin, Consumer, DatabaseOffsets, Producer, create_offsets_table
from metamq.errors import MetamqError, OwnershipLost
from metamq.tx import Recoverer, create_outcome_table, dbtx

TOPIC = "orders"

SCHEMA = """
CREATE TABLE IF NOT EXISTS stock (product TEXT PRIMARY KEY, quantity INT NOT NULL CHECK (quantity >= 0));
INSERT INTO stock VALUES ('tea', 100), ('coffee', 50) ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS orders (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, product TEXT, quantity INT);
CREATE TABLE IF NOT EXISTS shipped (id BIGINT PRIMARY KEY);
"""


def setup(database: str) -> None:
    """Makes missing tables, and the topic."""
    with psycopg.connect(database) as connection:
        connection.execute(SCHEMA)
        create_outcome_table(connection)  # in which this database decides its transactions
        create_offsets_table(connection)  # for the commits of shipments
    with Admin() as admin:
        admin.create_topic(TOPIC, partitions=4, exist_ok=True)


def order(database: str, product: str, quantity: int) -> int:
    """Takes an order, and returns its number. After any failure or crash, row and message both exist, or neither."""
    with psycopg.connect(database) as connection, Producer[bytes]() as producer, dbtx(connection, producer) as tx:
        left = connection.execute(
            "UPDATE stock SET quantity = quantity - %s WHERE product = %s RETURNING quantity", (quantity, product)
        ).fetchone()
        if left is None:
            raise LookupError(f"there is no {product}")  # both are rolled back
        row = connection.execute(
            "INSERT INTO orders (product, quantity) VALUES (%s, %s) RETURNING id", (product, quantity)
        ).fetchone()
        assert row is not None
        message = {"id": row[0], "product": product, "quantity": quantity}
        tx.send(TOPIC, json.dumps(message).encode(), key=product)
    return int(row[0])


def ship(database: str, idle_timeout_s: float | None) -> None:
    """Ships orders. A shipped order and the offset in the topic are also one transaction."""
    offsets = DatabaseOffsets(lambda: psycopg.connect(database))
    with (
        psycopg.connect(database) as connection,
        Consumer[bytes](
            topics=[TOPIC], group="shipping", auto_commit=False, offsets=offsets, idle_timeout_s=idle_timeout_s
        ) as consumer,
    ):
        for message in consumer:
            ordered = json.loads(message.value)
            try:
                connection.execute("INSERT INTO shipped VALUES (%s)", (ordered["id"],))
                consumer.commit(message, connection=connection)
            except OwnershipLost:
                connection.rollback()  # another member of the group ships it
                continue
            connection.commit()
            print(f"shipped {ordered['quantity']} x {ordered['product']}, order {ordered['id']}", flush=True)


def recover(database: str, grace_s: float, once: bool) -> None:
    """Finishes the transactions of applications that crashed, as the database has decided."""
    with Recoverer(lambda: psycopg.connect(database), grace_s=grace_s) as recoverer:
        if once:
            done = recoverer.run_once()
            print(f"{done.committed} committed, {done.rolled_back} rolled back, {done.left} left")
            for problem in done.problems:
                print(problem)
        else:
            recoverer.run(every_s=5)


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", default="", metavar="CONNECTION")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup")
    ordering = commands.add_parser("order")
    ordering.add_argument("product")
    ordering.add_argument("quantity", type=int)
    shipping = commands.add_parser("ship")
    shipping.add_argument("--idle", type=float, metavar="SECONDS", help="end after this time without an order")
    recovering = commands.add_parser("recover")
    recovering.add_argument("--once", action="store_true", help="look once, and end")
    recovering.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="skip younger transactions")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        if arguments.command == "setup":
            setup(arguments.database)
        elif arguments.command == "order":
            print(f"order {order(arguments.database, arguments.product, arguments.quantity)}")
        elif arguments.command == "ship":
            ship(arguments.database, arguments.idle)
        else:
            recover(arguments.database, arguments.grace, arguments.once)
    except (LookupError, psycopg.Error, MetamqError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
