"""The processes of a worker: their ends are noticed, whatever they have forked."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import pytest

from metamq.broker.workers.decisions import Reaction
from metamq.broker.workers.worker import Worker
from metamq.errors import ConfigError
from tests.parts import SLOW_S

REPORT = """print('{"ready": {"name": "", "host": "", "port": 0}}', flush=True)"""
FORK = "import os; os.fork() or (os.read(0, 1), os._exit(0))"  # standard input ends when the end is noticed
DIE = "os.kill(os.getpid(), 9)"


def worker(*lines: str, reactions: dict[int, Reaction] | None = None) -> Worker:
    command = [sys.executable, "-c", "\n".join(lines)]
    return Worker(0, command, os.environ, lambda: None, kind="worker", reactions=reactions)


async def run(one: Worker) -> None:
    async with asyncio.timeout(SLOW_S):
        await one.run()


@pytest.mark.parametrize("report", [REPORT, ""])
def test_the_end_is_noticed_while_a_fork_holds_the_output(report: str) -> None:
    one = worker(report, FORK, DIE, reactions={-9: Reaction.ENDED})
    asyncio.run(run(one))
    assert (one.state.phase, one.state.last_end, one.has_served) == ("ended", "was ended by SIGKILL", bool(report))
    assert one.ended_well, "a reaction to it was given"


def test_output_after_the_report_blocks_no_process() -> None:
    one = worker(REPORT, "print('x' * 1_000_000, flush=True)", reactions={0: Reaction.ENDED})
    asyncio.run(run(one))
    assert (one.state.starts, one.state.last_end) == (1, "ended with status 0")


def test_a_refused_command_line_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError, match="worker 0 refused its command line"):
        asyncio.run(run(worker("raise SystemExit(2)")))
    assert not caplog.records
