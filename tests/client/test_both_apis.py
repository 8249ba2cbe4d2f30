"""The blocking and the asyncio API are the same, and the types of their values can be read at run time."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from types import ModuleType

import pytest

import metamq.aio
import metamq.tx.aio
from metamq.client.admin import admin_model
from metamq.client.consumer import health
from metamq.client.fetch import consumer_options
from metamq.client.group import assignment
from metamq.client.producer import producer_api, producer_core
from metamq.tx.app import resource, xa_resource

NO_PARAMETERS: tuple[str, ...] = ()


def surface(cls: type) -> dict[str, list[tuple[str, object, object]]]:
    """Returns name, kind and default of each parameter, by method."""
    methods = {"__init__": cls.__init__} | {  # type: ignore[misc]
        name: method for name, method in inspect.getmembers(cls, callable) if not name.startswith("_")
    }
    found = {}
    for name, method in methods.items():
        parameters = inspect.signature(method).parameters.values()
        found[name] = [(one.name, one.kind, one.default) for one in parameters]
    return found


@pytest.mark.parametrize(
    ("blocking", "asyncio_one", "more", "left_out"),
    [
        (metamq.Producer, metamq.aio.Producer, {"open", "drain"}, ("on_full", "full_timeout_s")),
        (metamq.Consumer, metamq.aio.Consumer, {"open"}, NO_PARAMETERS),
        (metamq.Admin, metamq.aio.Admin, {"open"}, NO_PARAMETERS),
        (metamq.tx.XAResource, metamq.tx.aio.XAResource, {"open"}, NO_PARAMETERS),
        (metamq.tx.dbtx, metamq.tx.aio.dbtx, set(), NO_PARAMETERS),
    ],
)
def test_both_apis_have_the_same_methods_with_the_same_parameters_and_defaults(
    blocking: type, asyncio_one: type, more: set[str], left_out: tuple[str, ...]
) -> None:
    first, second = surface(blocking), surface(asyncio_one)
    assert second.keys() - first.keys() == more, "an asyncio client is opened in its loop; `send` of one never waits"
    assert not first.keys() - second.keys()
    first["__init__"] = [one for one in first["__init__"] if one[0] not in left_out]
    for name, parameters in first.items():
        assert second[name] == parameters, name


SETTINGS = (
    consumer_options.ConsumerOptions, consumer_options.ConsumerSettings, producer_core.ProducerOptions,
    producer_api.ProducerSettings, resource.XAOptions, xa_resource.XASettings,
)  # fmt: skip


def values_of(module: ModuleType) -> list[type]:
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__
        if dataclasses.is_dataclass(one) or typing.is_typeddict(one)
    ]


@pytest.mark.parametrize(
    "cls",
    [*SETTINGS, assignment.RebalanceHealth, *values_of(health), *values_of(admin_model)],
    ids=lambda one: one.__name__,
)
def test_the_types_of_results_and_settings_can_be_read_at_run_time(cls: type) -> None:
    assert typing.get_type_hints(cls).keys() >= cls.__annotations__.keys() > set()
