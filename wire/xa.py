"""The terms of XA: transaction ids, the codes of answers, the verbs of a branch.

It follows the X/Open specification "Distributed Transaction Processing: The XA Specification" (C193, 1991). Like PEP
249, it allows an empty branch qualifier. Ids are opaque bytes: they are compared, never decoded.
"""

from __future__ import annotations

import base64
import binascii
import enum
import secrets
from typing import Any, NamedTuple, Self

from metamq.errors import ConfigError, ProtocolError

FORMAT_ID = 0x4D51  # "MQ"
"""The format id of the ids that metamq makes."""
PART_BYTES_MAX = 64
FORMAT_ID_MAX = 0x7FFFFFFF


class Xid(NamedTuple):
    """The id of one branch. The branches of one global transaction share `gtrid`, and each has its own `bqual`."""

    format_id: int
    gtrid: bytes
    bqual: bytes = b""

    def check(self) -> Self:
        """Returns the id. Raises ConfigError, which names the wrong part."""
        if type(self.format_id) is not int or not 0 <= self.format_id <= FORMAT_ID_MAX:
            raise ConfigError(f"the format id of an Xid is {self.format_id!r}", hint=f"It is 0 to {FORMAT_ID_MAX}.")
        for name, part, least in (("gtrid", self.gtrid, 1), ("bqual", self.bqual, 0)):
            if not isinstance(part, bytes):
                raise ConfigError(f"the {name} of an Xid is {type(part).__name__}", hint="It is bytes.")
            if not least <= len(part) <= PART_BYTES_MAX:
                raise ConfigError(
                    f"the {name} of an Xid has {len(part)} bytes", hint=f"It has {least} to {PART_BYTES_MAX}."
                )
        return self

    @classmethod
    def random(cls, prefix: bytes = b"", bqual: bytes = b"") -> Self:
        """Makes a unique id. `prefix` begins its gtrid and says which application made it."""
        return cls(FORMAT_ID, prefix + secrets.token_bytes(16), bqual).check()

    def __str__(self) -> str:
        """The id in the format of psycopg and pgjdbc: format id, gtrid and bqual in base64, joined by underscores."""
        parts = (base64.b64encode(part).decode() for part in (self.gtrid, self.bqual))
        return "_".join((str(self.format_id), *parts))

    @property
    def whole(self) -> str:
        """The id of the global transaction, as `metamq tx` accepts it: the common prefix of its branches' ids."""
        return str(Xid(self.format_id, self.gtrid))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the result of str(). Raises ConfigError."""
        try:
            format_id, gtrid, bqual = text.split("_")
            parts = [base64.b64decode(part, validate=True) for part in (gtrid, bqual)]
            return cls(int(format_id), *parts).check()
        except (ValueError, binascii.Error):
            raise ConfigError(f"{text!r} is not a transaction id", hint="`metamq tx list` prints them.") from None

    @classmethod
    def unpack(cls, header: Any) -> Self:
        """Unpacks an id from a message of the protocol. Raises ProtocolError."""
        if not isinstance(header, list) or len(header) < len(cls._fields):
            raise ProtocolError(f"an Xid has {len(cls._fields)} fields")
        try:
            return cls(*header[: len(cls._fields)]).check()
        except ConfigError as error:
            raise ProtocolError(error.problem) from None


class XACode(enum.IntEnum):
    """The result codes of a verb."""

    OK = 0
    RDONLY = 3
    RETRY = 4
    HEURMIX = 5
    HEURRB = 6
    HEURCOM = 7
    HEURHAZ = 8
    RBROLLBACK = 100
    RBCOMMFAIL = 101
    RBDEADLOCK = 102
    RBINTEGRITY = 103
    RBOTHER = 104
    RBPROTO = 105
    RBTIMEOUT = 106
    RBTRANSIENT = 107
    RMERR = -3
    NOTA = -4
    INVAL = -5
    PROTO = -6
    RMFAIL = -7
    DUPID = -8
    OUTSIDE = -9


class Verb(enum.IntEnum):
    """The verbs of a branch. The numbers are part of the protocol."""

    START = 1
    JOIN = 2
    RESUME = 3
    SEND = 4
    END = 5
    FAIL = 6
    SUSPEND = 7
    PREPARE = 8
    COMMIT_ONE_PHASE = 9
    COMMIT = 10
    ROLLBACK = 11
    FORGET = 12
    HEURISTIC_COMMIT = 13
    HEURISTIC_ROLLBACK = 14
    RESOLVE = 15
    """Not a verb of XA: asks if the branch was committed. If it was not, no later request can commit it."""
    DECIDE = 16
    """Not a verb of XA: like COMMIT_ONE_PHASE, and it also decides for branches at other brokers; kept until FORGET."""
