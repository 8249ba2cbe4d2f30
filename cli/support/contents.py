"""The README of a bundle: it says for its reader, and for the person who sends it, what is inside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import metamq
from metamq.words import count

if TYPE_CHECKING:
    from metamq.cli.support.parcel import Parcel, SupportPart

INVARIANT = """\
It has no password, key, token, secret of a login or private key of TLS, and no value, key or header of a message. Of
settings, of answers of brokers and of nodes in ZooKeeper only known fields are taken, of logs only lines of metamq's
servers and of ZooKeeper. A filter then removes the secrets that this machine's settings, files and variables have, and
texts that look like a secret: they appear as (removed).

It has names: of hosts, addresses, users, certificates, topics, groups, members, files, and the ids of transactions,
which applications choose. Look at it before you send it, if such names are confidential.
"""


def readme(parts: Sequence[SupportPart], parcels: Sequence[Parcel]) -> str:
    """Returns the text."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    lines = [f"A support bundle of metamq {metamq.__version__}, made by `metamq bundle` at {now}.", "", INVARIANT]
    lines += ["errors.txt has what is missing and why; it is empty if nothing is.", "The parts:", ""]
    for part, parcel in zip(parts, parcels, strict=True):
        state = f"left out: {parcel.left_out}" if parcel.left_out else count(len(parcel.files), "file")
        if parcel.problems:
            state += f", {count(len(parcel.problems), 'problem')}: see errors.txt"
        lines += [f"{part.name}: {part.contents}", f"  {state}, {parcel.took_s:.1f} s"]
        lines += [f"  {name}" for name in sorted(parcel.files)]
    return "\n".join([*lines, ""])


def errors(parcels: Sequence[Parcel]) -> str:
    """Returns a line for each thing that is missing."""
    return "".join(f"{parcel.part}: {problem}\n" for parcel in parcels for problem in parcel.problems)
