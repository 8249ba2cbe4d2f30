"""`metamq user`, `metamq acl` and `metamq quota`: users who log in by password, rights, and quotas.

A password is never on a command line.
"""

from __future__ import annotations

import secrets
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.show import units
from metamq.cli.show.output import TABLE_OR_JSON, TEXT_OR_JSON, count, print_json, print_table, say
from metamq.errors import ConfigError
from metamq.security.login import read_secret
from metamq.security.rights import ALLOW, ANY_PRINCIPAL, DENY

if TYPE_CHECKING:
    from metamq import Admin
    from metamq.security.quotas import Quota
    from metamq.security.rights import Rule

GENERATED_BYTES = 24
OPTIONS = {"write_bytes_s": "--write-bytes", "read_bytes_s": "--read-bytes", "requests_s": "--requests"}
SHOWN_MAX = 5
"""Rights of a token in a table."""


@click.group(cls=Group)
def user() -> None:
    """Add, list and remove the users who log in by password; list and end the tokens of Spark's tasks.

    Programs log in with METAMQ_SECURITY_USER and METAMQ_SECURITY_PASSWORD_FILE. A program with a certificate needs no
    user: see `metamq security issue`.

    \b
    metamq user add etl
    metamq user list
    metamq user remove etl
    """


@user.command()
@click.argument("name")
@click.option("--password-file", metavar="FILE", help="File whose first line is the password.  [asks]")
@click.option("--generate", is_flag=True, help="Make a password, and print it.")
@TEXT_OR_JSON
def add(name: str, password_file: str | None, generate: bool, output: str) -> int:
    """Add the user NAME, or change its password.

    Asks for the password, unless it comes from a file, from standard input, or from --generate. Connections that are
    open stay open; new ones need the new password.

    \b
    metamq user add etl
    metamq user add etl --generate >etl.password
    metamq user add etl --password-file etl.password
    """
    if generate and password_file:
        raise click.UsageError("--generate makes a password, --password-file gives one: choose one of them")
    password = secrets.token_urlsafe(GENERATED_BYTES) if generate else _password(name, password_file)
    with current().admin() as admin:
        is_new = name not in admin.users()
        admin.set_user(name, password)
    if output == "json":
        print_json({"user": name, "is_new": is_new, **({"password": password} if generate else {})})
        return 0
    if generate:
        click.echo(password)
    say(f"The user {name} is added." if is_new else f"The user {name} has another password.")
    return 0


def _password(name: str, file: str | None) -> str:
    if file:
        return read_secret(file, "password")
    if sys.stdin.isatty():
        asked: str = click.prompt(f"Password of {name}", hide_input=True, confirmation_prompt=True, err=True)
        return asked
    given = sys.stdin.readline().rstrip("\r\n")
    if not given:
        raise ConfigError("there is no password on standard input", hint="Give --password-file or --generate.")
    return given


@user.command("list")
@TABLE_OR_JSON
def list_users(output: str) -> int:
    """Show the users who log in by password.

    \b
    metamq user list
    metamq user list -o json
    """
    with current().admin() as admin:
        names = admin.users()
    if output == "json":
        print_json(names)
    else:
        print_table(["USER"], [[name] for name in names])
    return 0


@user.command()
@click.argument("name")
@TEXT_OR_JSON
def remove(name: str, output: str) -> int:
    """Remove the user NAME: it cannot log in any more. Connections that are open stay open.

    \b
    metamq user remove etl
    """
    with current().admin() as admin:
        admin.remove_user(name)
        rules = [str(rule) for rule in admin.rules() if rule.principal == name]
        has_quota = name in admin.quotas()
    if output == "json":
        print_json({"user": name, "rules": rules, "has_quota": has_quota})
    else:
        left = f" {count(len(rules), 'rule')} for that name stay: see `metamq acl list`." if rules else ""
        left += " So does its quota: see `metamq quota list`." if has_quota else ""
        say(f"The user {name} is removed.{left}")
    return 0


@user.command()
@TABLE_OR_JSON
def tokens(output: str) -> int:
    """Show the tokens with which tasks of Spark log in: their principals, rights and times of expiry.

    \b
    metamq user tokens
    metamq user tokens -o json
    """
    with current().admin() as admin:
        found = admin.tokens()
    if output == "json":
        print_json([one._asdict() for one in found])
        return 0
    rows = []
    for one in found:
        rights = ", ".join(f"{right} {topic}" for right, topic in one.rights[:SHOWN_MAX])
        more = " ..." if len(one.rights) > SHOWN_MAX else ""
        expires = datetime.fromtimestamp(one.expires_ms / 1000).astimezone()
        rows.append([one.principal, one.token_id, rights + more, expires.isoformat(" ", "seconds")])
    print_table(["PRINCIPAL", "TOKEN", "RIGHTS", "EXPIRES"], rows)
    return 0


@user.command("end-tokens")
@click.argument("principal")
@TEXT_OR_JSON
def end_tokens(principal: str, output: str) -> int:
    """End all tokens of PRINCIPAL, a user or a certificate: their tasks fail. Queries that start later make new ones.

    `user remove`, and `user add` with another password, also end them.

    \b
    metamq user end-tokens etl
    """
    with current().admin() as admin:
        ended = admin.end_tokens(principal)
    if output == "json":
        print_json({"principal": principal, "ended": ended})
    else:
        say(f"{count(ended, 'token')} of {principal} ended." if ended else f"{principal} has no tokens.")
    return 0


@click.group(cls=Group)
def acl() -> None:
    """Show and change the rules of rights.

    Brokers with certificates do only what a rule allows; a `deny` overrides any `allow`. The certificates `admin` and
    `brokers` may do everything. A change applies within a second, also to open connections.

    \b
    PRINCIPAL  the name of a user or of a certificate; '*': all of them
    RIGHT      of topics: read, write, create, alter, delete;
               of the cluster: describe, promote, recover
    RESOURCE   topic:orders, 'topic:orders-*' or cluster

    \b
    metamq acl allow etl read topic:orders
    metamq acl list
    metamq acl explain etl read topic:orders
    """


def _arguments(command: Any) -> Any:
    command = click.argument("resources", metavar="RESOURCE...", nargs=-1, required=True)(command)
    return TEXT_OR_JSON(click.argument("principal")(click.argument("right")(command)))


@acl.command()
@_arguments
def allow(principal: str, right: str, resources: tuple[str, ...], output: str) -> int:
    """Give PRINCIPAL a right on each RESOURCE.

    \b
    metamq acl allow etl read topic:orders topic:refunds
    metamq acl allow etl write 'topic:report-*'
    metamq acl allow monitor describe cluster
    """
    with current().admin() as admin:
        _show(admin.add_rules(ALLOW, principal, right, *resources), "added", output)
    return 0


@acl.command()
@_arguments
def deny(principal: str, right: str, resources: tuple[str, ...], output: str) -> int:
    """Deny PRINCIPAL a right on each RESOURCE, whatever other rules allow.

    \b
    metamq acl deny '*' write topic:audit
    """
    with current().admin() as admin:
        _show(admin.add_rules(DENY, principal, right, *resources), "added", output)
    return 0


@acl.command("remove")
@click.argument("effect", type=click.Choice([ALLOW, DENY]))
@_arguments
def remove_rule(effect: str, principal: str, right: str, resources: tuple[str, ...], output: str) -> int:
    """Remove the rule for each RESOURCE. The words of a rule are those of `metamq acl list`.

    \b
    metamq acl remove allow etl read topic:orders
    """
    with current().admin() as admin:
        _show(admin.remove_rules(effect, principal, right, *resources), "removed", output)
    return 0


@acl.command("list")
@TABLE_OR_JSON
def list_rules(output: str) -> int:
    """Show all rules.

    \b
    metamq acl list
    metamq acl list -o json
    """
    with current().admin() as admin:
        rules = admin.rules()
    if output == "json":
        print_json([_fields(rule) for rule in rules])
    else:
        rows = [[rule.principal, rule.effect, rule.right, str(rule.resource)] for rule in rules]
        print_table(["PRINCIPAL", "EFFECT", "RIGHT", "RESOURCE"], sorted(rows))
    return 0


@acl.command()
@click.argument("principal")
@click.argument("right")
@click.argument("resource")
@TEXT_OR_JSON
def explain(principal: str, right: str, resource: str, output: str) -> int:
    """Show if PRINCIPAL has a right on RESOURCE, and the rule that decides. Ends with status 1 if it has not.

    \b
    metamq acl explain etl read topic:orders
    """
    with current().admin() as admin:
        found = admin.explain_right(principal, right, resource)
    if output == "json":
        rule = None if found.rule is None else _fields(found.rule)
        print_json({"is_allowed": found.is_allowed, "rule": rule, "reason": found.reason})
    else:
        click.echo(f"{'yes' if found.is_allowed else 'no'}: {found.reason}")
    _note_security_off()
    return 0 if found.is_allowed else 1


@click.group(cls=Group)
def quota() -> None:
    """Show and change quotas: the limits of a principal at each broker, per second.

    A broker delays requests above the quota, and refuses none: its clients log a warning, and wait. The certificates
    `admin` and `brokers` have no quota. A change applies within a second, also to open connections.

    \b
    metamq quota set etl --write-bytes 10MB --read-bytes 50MB
    metamq quota set '*' --requests 1000
    metamq quota list
    """


@quota.command("set")
@click.argument("principal")
@click.option("--write-bytes", type=units.SIZE, help="Bytes of messages sent in a second: 10MB.")
@click.option("--read-bytes", type=units.SIZE, help="Bytes of messages read in a second: 50MB.")
@click.option("--requests", type=click.IntRange(1), help="Requests in a second.")
@TEXT_OR_JSON
def set_quota(
    principal: str, write_bytes: int | None, read_bytes: int | None, requests: int | None, output: str
) -> int:
    """Set the quota of PRINCIPAL, a user or a certificate; '*': each one without its own.

    It replaces the former quota. Without its option, a value has no limit.

    \b
    metamq quota set etl --write-bytes 10MB --requests 500
    """
    if 0 in (write_bytes, read_bytes):
        raise click.UsageError("a limit of 0 is not possible: leave the option out for no limit")
    with current().admin() as admin:
        found = admin.set_quota(
            principal, write_bytes_s=write_bytes or 0, read_bytes_s=read_bytes or 0, requests_s=requests or 0
        )
        _note_unknown(admin, principal)
    if output == "json":
        print_json(_quota_fields(principal, found))
    else:
        limits = ", ".join(f"{OPTIONS[name]} {limit:,}" for name, limit in found._asdict().items() if limit)
        say(f"The quota of {principal} at each broker, in a second: {limits}.")
    _note_security_off()
    return 0


def _note_security_off() -> None:
    if not current().access().security.is_on:
        say("Security is off: brokers apply no rule and no quota. docs/security.md turns it on.")


def _note_unknown(admin: Admin, principal: str) -> None:
    """Warns if no user has this name: it may be a typing error."""
    if principal != ANY_PRINCIPAL and principal not in admin.users():
        say(f"No user has the name {principal}. The quota applies to a certificate or a token of that name.")


def _quota_fields(principal: str, found: Quota) -> dict[str, object]:
    return {"principal": principal, **{name: limit or None for name, limit in found._asdict().items()}}


@quota.command("list")
@TABLE_OR_JSON
def list_quotas(output: str) -> int:
    """Show all quotas.

    \b
    metamq quota list
    metamq quota list -o json
    """
    with current().admin() as admin:
        quotas = admin.quotas()
    if output == "json":
        print_json([_quota_fields(name, found) for name, found in quotas.items()])
    else:
        rows = [
            [name, *(f"{limit:,}" if limit else units.UNLIMITED for limit in found)] for name, found in quotas.items()
        ]
        print_table(["PRINCIPAL", "WRITE BYTES/S", "READ BYTES/S", "REQUESTS/S"], rows)
    return 0


@quota.command("remove")
@click.argument("principal")
@TEXT_OR_JSON
def remove_quota(principal: str, output: str) -> int:
    """Remove the quota of PRINCIPAL. The quota of '*' then applies, if there is one.

    \b
    metamq quota remove etl
    """
    with current().admin() as admin:
        admin.remove_quota(principal)
    if output == "json":
        print_json({"principal": principal})
    else:
        say(f"The quota of {principal} is removed.")
    return 0


def _show(rules: list[Rule], what: str, output: str) -> None:
    if output == "json":
        print_json([_fields(rule) for rule in rules])
    else:
        for rule in rules:
            say(f"The rule `{rule}` is {what}.")
    _note_security_off()


def _fields(rule: Rule) -> dict[str, str]:
    return {**rule._asdict(), "resource": str(rule.resource)}
