"""Shapes: schemas of all formats in one form, and the rule by which a reader's shape reads a writer's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from metamq.errors import ConfigError

SHAPES_MAX = 10_000
"""The parts of one schema. References can multiply: ten levels with ten references each are ten thousand million."""

_WIDER = {
    "integer": {"number"},
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "text": {"bytes"},
    "int8": {"int16", "int32", "int64"},
    "int16": {"int32", "int64"},
    "int32": {"int64"},
    "uint8": {"uint16", "uint32", "uint64"},
    "uint16": {"uint32", "uint64"},
    "uint32": {"uint64"},
    "sint32": {"sint64"},
}
"""The types that read all values of another type. JSON has "integer", Avro "int", Protobuf and Arrow "int32". Avro
also lets a text be read from bytes, but most bytes are no UTF-8."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One type. A record has `fields`, a list or a map an `item`; an enumeration has `values`."""

    name: str
    fields: Mapping[str, Field] = field(default_factory=dict)
    item: Shape = ()
    values: frozenset[str] = frozenset()
    limits: frozenset[str] = frozenset()
    """Further conditions, as '"minimum": 0'."""
    is_closed: bool = False
    """True if a reader refuses fields that it does not know."""
    type_name: str = ""
    """The name of a type that a reader knows by its name, as Avro's; empty: the name does not matter."""

    def __str__(self) -> str:
        named = f"{self.name} {self.type_name}".rstrip()
        more = [*sorted(self.values), *sorted(self.limits)]
        return f"{named} ({', '.join(more)})" if more else named


Shape = tuple[Kind, ...]
"""The alternatives of a value; null is one of them."""
ANY: Shape = (Kind("any"),)


class Field(NamedTuple):
    """A field of a record. `is_needed`: a reader fails without it. `is_certain`: a writer always writes it."""

    shape: Shape
    is_needed: bool
    is_certain: bool
    label: str = ""
    """The name for people, if fields go by number."""
    aliases: tuple[str, ...] = ()
    """Other names by which a reader finds the field."""


class Mismatch(NamedTuple):
    """A reason that a reader cannot read a writer's messages."""

    path: str
    written: str
    read: str
    reason: str


class Budget:
    """Counts the parts of a schema while it is read."""

    def __init__(self) -> None:
        self._left = SHAPES_MAX

    def take(self, names: tuple[str, ...], name: str) -> tuple[str, ...]:
        """Counts one part. Returns the names of the enclosing types, with `name`. Raises ConfigError."""
        self._left -= 1
        if self._left < 0:
            hint = "Use fewer references."
            raise ConfigError(f"the schema has more than {SHAPES_MAX:,} parts with all its references", hint=hint)
        if name and name in names:
            hint = "Give the inner values an id, or encode them as text."
            raise ConfigError(f"the schema is recursive: {name!r} contains itself", hint=hint)
        return (*names, name) if name else names


def shown(shape: Shape) -> str:
    """Formats a shape for an error."""
    return " or ".join(str(kind) for kind in shape)


def mismatches(written: Shape, read: Shape, path: str = "") -> Iterator[Mismatch]:
    """Yields the reasons that a reader of `read` fails on messages of `written`."""
    for kind in written:
        found = [list(_against(kind, other, path)) for other in read]
        if all(found):
            # The nearest alternative: the one of the same name, whose fields differ.
            near = next((one for one, other in zip(found, read, strict=True) if other.name == kind.name), None)
            if near is not None and near[0].path != path:
                yield from near
            else:
                yield Mismatch(path, shown(written), shown(read), f"its readers do not accept {kind}")


def _against(written: Kind, read: Kind, path: str) -> Iterator[Mismatch]:
    wrong = Mismatch(path, str(written), str(read), f"its readers do not accept {written}")
    if read.name == "any":
        return
    if written.name == "enum" and read.name == "string":
        if read.limits:
            yield wrong
        return
    if read.name != written.name and read.name not in _WIDER.get(written.name, ()):
        yield wrong
        return
    if read.type_name != written.type_name:
        yield wrong
        return
    if not read.limits <= written.limits or (read.name == "enum" and not written.values <= read.values):
        yield wrong
        return
    if read.item or written.item:
        yield from mismatches(written.item, read.item, f"{path}[]")
    for name, one in read.fields.items():
        place = _place(path, name, one)
        there = next((written.fields[known] for known in (name, *one.aliases) if known in written.fields), None)
        if there is not None:
            yield from mismatches(there.shape, one.shape, place)
        if one.is_needed and (there is None or not there.is_certain):
            state = "absent" if there is None else f"optional {shown(there.shape)}"
            yield Mismatch(
                place, state, f"required {shown(one.shape)}", "its readers need it, and a message may lack it"
            )
    if read.is_closed:
        for name in sorted(written.fields.keys() - read.fields.keys()):
            yield Mismatch(
                _place(path, name, written.fields[name]),
                shown(written.fields[name].shape),
                "absent",
                "its readers refuse unknown fields",
            )


def _place(path: str, name: str, one: Field) -> str:
    return f"{path}.{one.label or name}" if path else one.label or name
