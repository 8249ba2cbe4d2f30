"""The effect of each verb in each state of a branch: the state table of the XA specification (chapter 6), as data.

NONE            the broker does not know the id, or remembers only that it was committed.
ACTIVE          a session works in the branch.
IDLE            no session works in the branch, and it is not prepared.
PREPARED        the branch can be committed and rolled back; it waits for that, and has no time-out.
ROLLBACK_ONLY   the branch can only be rolled back, and its messages are gone; kept so that its owner gets the reason.
HEURISTIC       an operator has decided; kept until the transaction manager knows that and forgets the branch.
DECIDED         not in XA: committed, and branches at other brokers follow; kept until all followers have committed.
"""

from __future__ import annotations

import enum

from metamq.wire.xa import Verb


class BranchPhase(enum.Enum):
    """The state of a branch."""

    __hash__ = object.__hash__  # Enum's own is written in Python

    NONE = "none"
    ACTIVE = "active"
    IDLE = "idle"
    PREPARED = "prepared"
    ROLLBACK_ONLY = "rollback-only"
    HEURISTIC = "heuristically completed"
    DECIDED = "decided"


class Ruling(enum.Enum):
    """The result of a verb in a state."""

    DO = "the verb is carried out"
    NOTA = "the branch is not known"
    PROTO = "the verb is not allowed in this state"
    DUPID = "the id is in use"
    ROLLED_BACK = "the branch is rolled back, or must be: the answer is the reason"
    HEURISTIC = "the answer is the operator's decision"
    COMMITTED = "the answer is that the branch is committed"


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
"""States that a restart keeps."""
FORGETS = frozenset({Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE})
"""Verbs that end a rollback-only branch: a client does not come back after this answer."""
