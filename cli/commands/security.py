"""`metamq security`: makes, renews and revokes the certificates of a cluster, in a folder of this machine."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.show.output import (
    TABLE_OR_JSON,
    TEXT_OR_JSON,
    YES,
    confirm,
    count,
    listed,
    print_json,
    print_table,
    say,
)
from metamq.cli.show.progress import progress_bar
from metamq.client.net.first_contact import open_session
from metamq.errors import ConfigError
from metamq.security.config import LOOPBACK, WARN_DAYS
from metamq.zk.cluster.node_acls import brokers_without_certificate, correct_nodes, wrong_nodes

if TYPE_CHECKING:
    from metamq.security.certificates import CertificateInfo

_FOLDER = click.option(
    "--dir",
    "folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="METAMQ_SECURITY_DIR",
    default="./metamq-security",
    show_default=True,
    help="Folder of the authority and of all certificates.",
)
_DAYS = click.option(
    "--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="Days until a certificate expires."
)
_HOSTS = "Names and addresses of the servers, separated by commas; the loopback is always among them."


@click.group(cls=Group)
def security() -> None:
    """Make, renew and revoke the certificates of a cluster.

    The folder has the key of the authority, which signs all certificates. Keep the folder on one machine, and a copy in
    a safe place; copy to other machines only the files that they need.

    \b
    metamq security init --hosts broker-0.example.org,broker-1.example.org
    metamq security issue etl
    metamq security list
    metamq security revoke etl
    """


@security.command()
@click.option("--hosts", default="", metavar="HOST,...", help=_HOSTS)
@_FOLDER
@_DAYS
@TEXT_OR_JSON
def init(hosts: str, folder: Path, days: int, output: str) -> int:
    """Make an authority, and the certificates of the brokers, of ZooKeeper and of an administrator.

    All brokers share the certificate `brokers`, which is valid for --hosts. A broker uses it if METAMQ_SECURITY_DIR is
    this folder, or a copy with ca.crt, brokers.crt, brokers.key and revoked.crl.

    \b
    metamq security init
    metamq security init --hosts broker-0.example.org,10.0.0.7
    metamq security init --dir /etc/metamq/security
    """
    from metamq.security.certificates import make_all

    made = make_all(folder, _names(hosts), days=days)
    if output == "json":
        print_json([_json(one) for one in made])
        return 0
    say(f"The folder {folder} has the authority, and certificates for: {', '.join(one.name for one in made)}.")
    say(f"Start brokers with METAMQ_SECURITY_DIR={folder}, and programs with METAMQ_SECURITY_CA={folder / 'ca.crt'}.")
    return 0


@security.command()
@click.argument("name")
@click.option("--hosts", default="", metavar="HOST,...", help=f"For a server. {_HOSTS}")
@_FOLDER
@_DAYS
@TEXT_OR_JSON
def issue(name: str, hosts: str, folder: Path, days: int, output: str) -> int:
    """Make the certificate NAME, or renew it: a new key, and a new date of expiry.

    A renewed certificate has the hosts of the former one, unless --hosts gives others. Running processes use it for
    their next connection, without a restart. The former one is valid until it expires, or until it is revoked.

    \b
    metamq security issue etl
    metamq security issue brokers --hosts broker-0.example.org,10.0.0.7
    """
    from metamq.security.certificates import Authority

    authority = Authority(folder)
    before = [one for one in authority.certificates() if one.name == name]
    names = _names(hosts) if hosts else before[0].hosts if before else ()
    made = authority.issue(name, names, days=days)
    if output == "json":
        print_json(_json(made))
    else:
        say(f"{folder / name}.crt and .key are valid until {made.not_after:%Y-%m-%d}.")
    return 0


@security.command("list")
@_FOLDER
@TABLE_OR_JSON
def list_certificates(folder: Path, output: str) -> int:
    """Show the certificates, and the days until they expire. The exit status is 1 if one must be renewed.

    \b
    metamq security list
    metamq security list -o json | jq '.[] | select(.days_left < 30)'
    """
    from metamq.security.certificates import Authority

    found = Authority(folder).certificates()
    if output == "json":
        print_json([_json(one) for one in found])
    else:
        rows = [[one.name, _state(one), str(_days_left(one)), ",".join(one.hosts) or None] for one in found]
        print_table(["NAME", "STATE", "DAYS LEFT", "HOSTS"], rows)
    return 1 if any(_state(one) in ("expired", "renew it") for one in found) else 0


@security.command()
@click.argument("name")
@_FOLDER
@TEXT_OR_JSON
def revoke(name: str, folder: Path, output: str) -> int:
    """Revoke the certificate NAME, and all former ones of that name: copy revoked.crl to all brokers.

    Brokers refuse it for new connections; open ones stay. `metamq security issue NAME` makes another certificate.

    \b
    metamq security revoke etl
    """
    from metamq.security.certificates import Authority

    revoked = Authority(folder).revoke(name)
    if output == "json":
        print_json([_json(one) for one in revoked])
        return 0
    say(f"{count(len(revoked), 'certificate')} of the name {name} are in {folder / 'revoked.crl'}.")
    return 0


def _names(hosts: str) -> tuple[str, ...]:
    found = [one.strip() for one in hosts.split(",") if one.strip()]
    for one in found:
        if one.count(":") == 1:
            raise ConfigError(f"--hosts has {one!r} with a port", hint="Give the host alone.")
    return tuple(dict.fromkeys([*found, *LOOPBACK]))


def _days_left(one: CertificateInfo) -> int:
    return one.days_left(datetime.now(UTC))


def _state(one: CertificateInfo) -> str:
    if one.is_revoked:
        return "revoked"
    days = _days_left(one)
    return "expired" if days < 0 else "renew it" if days < WARN_DAYS else "ok"


def _json(one: CertificateInfo) -> dict[str, Any]:
    found = {**asdict(one), "serial": f"{one.serial:x}", "state": _state(one), "days_left": _days_left(one)}
    return {**found, "not_before": one.not_before.isoformat(), "not_after": one.not_after.isoformat()}


@security.command()
@YES
@TEXT_OR_JSON
def migrate(yes: bool, output: str) -> int:
    """Give the nodes in ZooKeeper their access lists, if the cluster is older than its security.

    Brokers and administrators then own topics, registrations, users and rules: other clients cannot change them. Run it
    as an administrator, after all brokers run with security. You may repeat it.

    \b
    metamq security migrate          shows the plan
    metamq security migrate --yes
    """
    access = current().access()
    if not access.security.is_on or not access.security.zookeeper_tls:
        raise ConfigError(
            "the connection to ZooKeeper has no TLS, so ZooKeeper does not know its clients",
            hint="Set METAMQ_SECURITY_DIR and METAMQ_SECURITY_ROLE=admin, and no METAMQ_SECURITY_ZOOKEEPER_TLS.",
        )
    asyncio.run(_migrate(yes, output))
    return 0


async def _migrate(yes: bool, output: str) -> None:
    async with await open_session(current().access(), patient=False) as session:
        paths = await wrong_nodes(session)
        where = f"{session.paths.root} in ZooKeeper at {session.servers}"
        if running := await brokers_without_certificate(session):
            raise ConfigError(
                f"running brokers have no certificate at ZooKeeper, and would end: {listed(running)}",
                hint="Restart them with METAMQ_SECURITY_DIR first.",
            )
        refused = []
        if paths:
            confirm([f"Other clients can change {count(len(paths), 'node')} of {where}: {listed(paths)}."], yes=yes)
            with progress_bar("Correcting", len(paths), unit="nodes") as advance:
                refused = await correct_nodes(session, paths, advance)
    if refused:
        raise ConfigError(
            f"{count(len(refused), 'node')} of {where} belong to another client, which does not allow a change: "
            f"{listed(refused)}",
            hint="Set METAMQ_SECURITY_ROLE=admin; if that does not help, delete them as ZooKeeper's superuser.",
        )
    if output == "json":
        print_json({"corrected": paths})
    else:
        say(f"{count(len(paths), 'node')} corrected." if paths else f"All nodes of {where} have their access lists.")
