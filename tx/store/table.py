"""What each verb does in each state of a branch: the state table of the XA specification (chapter 6), as data.

NONE            nobody knows the id; a committed one may be remembered
ACTIVE          somebody works in it
IDLE            nobody does, and it is not prepared
PREPARED        promised: it can be committed and rolled back, and nothing happens to it by itself
ROLLBACK_ONLY   it can be rolled back only, and what was sent is gone; kept so that its owner is told why
HEURISTIC       an operator has decided; kept until the transaction manager has been told and forgets it
DECIDED         not of XA: committed, and branches at other brokers follow; kept until they all have
"""

from __future__ import annotations

import enum

from metamq.wire.xa import Verb


class BranchPhase(enum.Enum):
    """Where a branch is in its life."""

    __hash__ = object.__hash__  # Enum's own is written in Python

    NONE = "none"
    ACTIVE = "active"
    IDLE = "idle"
    PREPARED = "prepared"
    ROLLBACK_ONLY = "rollback-only"
    HEURISTIC = "heuristically completed"
    DECIDED = "decided"


class Ruling(enum.Enum):
    """What follows from a verb in a state."""

    DO = "it is done"
    NOTA = "nobody knows the branch"
    PROTO = "it is not allowed there"
    DUPID = "the id is in use"
    ROLLED_BACK = "the branch is, or is to be, rolled back: its reason is the answer"
    HEURISTIC = "an operator's decision is the answer"
    COMMITTED = "it is committed, which is the answer"


_DO, _NOTA, _PROTO, _DUPID = Ruling.DO, Ruling.NOTA, Ruling.PROTO, Ruling.DUPID
_RB, _HEUR, _COMM = Ruling.ROLLED_BACK, Ruling.HEURISTIC, Ruling.COMMITTED

_STATES = (
    BranchPhase.NONE,
    BranchPhase.ACTIVE,
    BranchPhase.IDLE,
    BranchPhase.PREPARED,
    BranchPhase.ROLLBACK_ONLY,
    BranchPhase.HEURISTIC,
    BranchPhase.DECIDED,
)
_ROWS: dict[Verb, tuple[Ruling, ...]] = {
    #                         NONE    ACTIVE  IDLE    PREPARED RB-ONLY HEURISTIC DECIDED
    Verb.START:              (_DO,    _DUPID, _DUPID, _DUPID, _DUPID, _DUPID, _DUPID),
    Verb.JOIN:               (_NOTA,  _DO,    _DO,    _PROTO, _RB,    _PROTO, _PROTO),
    Verb.RESUME:             (_NOTA,  _DO,    _DO,    _PROTO, _RB,    _PROTO, _PROTO),  # of a suspended association
    Verb.SEND:               (_NOTA,  _DO,    _PROTO, _PROTO, _RB,    _PROTO, _PROTO),
    Verb.END:                (_NOTA,  _DO,    _DO,    _PROTO, _RB,    _PROTO, _PROTO),  # IDLE: of a suspended one
    Verb.FAIL:               (_NOTA,  _DO,    _DO,    _PROTO, _RB,    _PROTO, _PROTO),  # IDLE: of a suspended one
    Verb.SUSPEND:            (_NOTA,  _DO,    _PROTO, _PROTO, _RB,    _PROTO, _PROTO),
    Verb.PREPARE:            (_NOTA,  _PROTO, _DO,    _PROTO, _RB,    _PROTO, _PROTO),
    Verb.COMMIT_ONE_PHASE:   (_NOTA,  _PROTO, _DO,    _PROTO, _RB,    _PROTO, _COMM),
    Verb.COMMIT:             (_NOTA,  _PROTO, _PROTO, _DO,    _PROTO, _HEUR, _COMM),
    Verb.ROLLBACK:           (_NOTA,  _PROTO, _DO,    _DO,    _DO,    _HEUR, _COMM),
    Verb.FORGET:             (_NOTA,  _NOTA,  _NOTA,  _NOTA,  _NOTA,  _DO, _DO),
    Verb.HEURISTIC_COMMIT:   (_NOTA,  _PROTO, _PROTO, _DO,    _PROTO, _HEUR, _PROTO),
    Verb.HEURISTIC_ROLLBACK: (_NOTA,  _PROTO, _PROTO, _DO,    _PROTO, _HEUR, _PROTO),
    Verb.RESOLVE:            (_NOTA,  _DO,    _DO,    _PROTO, _DO,    _HEUR, _COMM),
    Verb.DECIDE:             (_NOTA,  _PROTO, _DO,    _PROTO, _RB,    _PROTO, _COMM),
}  # fmt: skip
TABLE = {(verb, state): ruling for verb, row in _ROWS.items() for state, ruling in zip(_STATES, row, strict=True)}

LASTING = (BranchPhase.PREPARED, BranchPhase.HEURISTIC, BranchPhase.DECIDED)
"""States that a restart leaves as they are."""
FORGETS = frozenset({Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE})
"""Verbs that end a branch which is rollback-only: who is answered so is not to come back."""
