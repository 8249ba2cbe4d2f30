"""Marks each test `pure` or `parts`: by what its code and its fixtures refer to, directly or through helpers in tests/.

A test is `parts` if it reaches something that starts processes. The others are `pure`: a pure test that starts a
process fails, so that a reference that is not seen here is noticed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

STARTERS = {
    "docker",
    "getfixturevalue",  # takes a fixture that only the run of the test knows
    "metamq.broker.workers.worker.Worker",
    "metamq.spark_consumers.spark_session",
    "metamq.testing",
    "metamq.testing.clusters",  # imported by the fixtures when they run
    "metamq.zk.server.embedded.EmbeddedZooKeeper",
    "metamq.zk.server.java",
    "multiprocessing",
    "os.fork",
    "pyspark",
    "subprocess",
    "tests.one_zookeeper",
}
"""Modules, and names in them, that start processes."""
EVENTS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")
"""The audit events of Python for a new process."""
WRAPPED = ("__wrapped__", "_fixture_function", "hypothesis", "inner_test")
"""Where decorators, fixtures and Hypothesis keep the function."""

_running: pytest.Item | None = None
"""The pure test that runs now."""
_started: list[str] = []


def pytest_configure() -> None:
    sys.addaudithook(_notice)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.parts if starts_processes(item) else pytest.mark.pure)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Nothing is pure between tests."""
    global _running
    _running = item if item.get_closest_marker("pure") else None
    try:
        return (yield)
    finally:
        _running = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Fails a test that has swallowed the error of the audit hook. Fixtures of the session may end here."""
    global _running
    _running = None
    yield
    started = _started.copy()
    _started.clear()
    assert not started, started[0]


def _notice(event: str, _arguments: tuple[Any, ...]) -> None:
    if _running is not None and event in EVENTS:
        _started.append(f"{_running.nodeid} is marked pure by tests/kinds.py, but starts a process: {event}")
        raise AssertionError(_started[-1])


def starts_processes(item: pytest.Item) -> bool:
    """Whether the test, or a fixture that it takes, reaches one of STARTERS."""
    if not isinstance(item, pytest.Function):
        return True
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    given = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    return any(map(reaches_starter, _callables([item.function, *fixtures, *given])))


@functools.cache
def reaches_starter(start: Callable[..., object]) -> bool:
    """Whether this function or class does, through whatever it refers to in tests/."""
    seen, waiting = {start}, [start]
    while waiting:
        names, found = _references(waiting.pop())
        if not STARTERS.isdisjoint(names):
            return True
        fresh = {one for one in found if one.__module__.startswith("tests.")} - seen
        seen |= fresh
        waiting += fresh
    return False


@functools.cache
def _references(one: Callable[..., object]) -> tuple[set[str], list[Callable[..., object]]]:
    """The names, and the functions and classes, that a function's code or a class has."""
    if isinstance(one, type):
        return set(), list(_callables([*vars(one).values(), *one.__bases__]))
    if not isinstance(one, FunctionType):
        return set(), []
    names = set(_names(one.__code__))
    objects = [one.__globals__[name] for name in names if name in one.__globals__]
    objects += [cell.cell_contents for cell in one.__closure__ or () if not _is_empty(cell)]
    for module in [thing for thing in objects if isinstance(thing, ModuleType)]:
        names |= {f"{module.__name__}.{name}" for name in names} | set(_parents(module.__name__))
        objects += [value for name, value in vars(module).items() if name in names]
    found = list(_callables(objects))
    for thing in found:
        names |= set(_parents(f"{thing.__module__}.{thing.__qualname__}"))
    return names, found


def _names(code: CodeType) -> Iterator[str]:
    """Of globals, attributes and imports, also of the functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _parents(name: str) -> Iterator[str]:
    """Yields "a", "a.b" and "a.b.c" of "a.b.c"."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _callables(things: Iterable[object]) -> Iterator[Callable[..., Any]]:
    """Yields the functions and classes in these, without what decorators have put around them."""
    for thing in things:
        if isinstance(thing, int | float | str | bytes):  # the elements of long lists: this saves seconds
            continue
        if isinstance(thing, dict):
            yield from _callables(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset):
            yield from _callables(thing)
        elif isinstance(thing, property):
            yield from _callables([thing.fget])
        elif isinstance(thing, type):
            yield thing
        elif isinstance(thing, MethodType):
            yield from _callables([thing.__func__])
        elif isinstance(thing, functools.partial):
            yield from _callables([thing.func])
        elif (own := getattr(thing, "__dict__", None)) and (inner := [own[name] for name in WRAPPED if name in own]):
            yield from _callables(inner[:1])
        elif isinstance(thing, FunctionType):
            yield thing


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
