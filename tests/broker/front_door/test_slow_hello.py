"""Strangers who take their time: closed after the time-out, whether they trickle or say nothing."""

from __future__ import annotations

from typing import Any

import pytest

from metamq.broker.front_door.protocol import GOODBYE_TIMEOUT_S, HELLO_TIMEOUT_S


def test_a_hello_that_does_not_come(front: Any) -> None:
    for slow in front.slow:
        slow.join(HELLO_TIMEOUT_S + 60)
        assert not slow.is_alive()
        assert slow.hung_up
        assert slow.lasted_s > HELLO_TIMEOUT_S - 1


def test_a_greeted_connection_may_be_silent_for_longer(front: Any) -> None:
    """The first client of all, older than the slow ones."""
    assert front.patient.ask(7, None).status == 0


def test_a_refused_client_that_does_not_hang_up(front: Any) -> None:
    """It was told, and given the end of the stream; a while later the connection is gone, whatever it still sends."""
    assert "cannot have a header" in str(front.error_of(front.rude.answer()))
    assert front.rude.ended()

    def sends() -> bool:
        front.rude.send(bytes(1000))
        return False

    with pytest.raises(ConnectionError):
        front.until(sends, GOODBYE_TIMEOUT_S + 60)
