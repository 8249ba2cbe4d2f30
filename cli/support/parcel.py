"""The parts of a bundle: each has a time limit, and keeps what it has when it fails. All run at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from metamq.errors import MetamqError
from metamq.threads import start
from metamq.zk.documents import collect_skipped

T = TypeVar("T")


class LeftOut(Exception):
    """A part that does not apply here. The text is the reason, and the step that would change that."""


@dataclass(eq=False)
class Parcel:
    """The files of one part, and the reasons for those that are missing. Belongs to the event loop."""

    part: str
    files: dict[str, object] = field(default_factory=dict)
    """By path in the archive: a text, or a value for JSON. The part may change the value until it ends."""
    problems: list[str] = field(default_factory=list)
    left_out: str = ""
    """The reason why the part does not apply here; empty if it does."""
    took_s: float = 0.0

    def missing(self, what: str, error: Exception | str) -> None:
        """Notes that something cannot be collected."""
        problem = f"{what}: {error if isinstance(error, str) else problem_of(error)}"
        if problem not in self.problems:
            self.problems.append(problem)


@dataclass(frozen=True, slots=True)
class SupportPart:
    """A part: its name, a sentence about its files for the README, and the function that collects them."""

    name: str
    contents: str
    collect: Callable[[Parcel], Awaitable[None]]
    more_s: float = 0.0
    """Seconds that it waits on purpose, in addition to the limit."""


def problem_of(error: BaseException) -> str:
    """Describes an error on one line."""
    if isinstance(error, MetamqError):
        return error.problem
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return f"internal error: {error!r}"


async def collect_all(parts: Sequence[SupportPart], limit_s: float, done: Callable[[int], None]) -> list[Parcel]:
    """Returns what each part has collected, in their order. `done` is called with 1 after each part."""

    async def collected(part: SupportPart) -> Parcel:
        parcel = await _collected(part, limit_s)
        done(1)
        return parcel

    return await asyncio.gather(*map(collected, parts))


async def _collected(part: SupportPart, limit_s: float) -> Parcel:
    parcel, began = Parcel(part.name), time.monotonic()
    limit = asyncio.timeout(limit_s + part.more_s)
    with collect_skipped() as unreadable:
        try:
            async with limit:
                await part.collect(parcel)
        except LeftOut as reason:
            parcel.left_out = str(reason)
        except Exception as error:  # the other parts are as good without this one
            is_late = isinstance(error, TimeoutError) and limit.expired()
            parcel.problems.append(f"not complete after {limit_s:g} s" if is_late else problem_of(error))
    for skipped in unreadable:
        parcel.missing("a node is left out", skipped)
    parcel.took_s = round(time.monotonic() - began, 3)
    return parcel


async def in_thread(work: Callable[[], T]) -> T:
    """Returns the result of blocking work. Its thread does not delay the end of the command. Raises as the work."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except Exception as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the command has ended
            loop.call_soon_threadsafe(settle, result, error)

    start(threading.Thread(target=run, name="metamq-bundle", daemon=True))
    return await answer
