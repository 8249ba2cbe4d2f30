"""Values of typed topics as JSON documents, by the registered schemas: commands and the console have no class for them.

A document has base64 for bytes, ISO 8601 for times, and text for decimals, UUIDs, NaN and infinity.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from metamq.client.schemas.arrow import arrow_codec, arrow_schema
from metamq.client.schemas.avro_documents import avro_documents
from metamq.client.schemas.frame import SchemaFrame
from metamq.client.schemas.protobuf_documents import protobuf_documents
from metamq.client.schemas.value_codec import DocumentCodec, library, plain, wrong_field
from metamq.errors import ConfigError, MetamqError
from metamq.zk.documents import parse

if TYPE_CHECKING:
    from metamq.zk.cluster.schemas import Schema, TopicSchemas

_PROBLEM_CHARS = 300


class Encode(Protocol):
    """Encodes documents. See TopicDocuments.encoder()."""

    def __call__(self, document: Any, text: bytes | None = None) -> bytes:
        """Returns the bytes of a value. Raises ValueError, with the field."""
        ...


class TopicDocuments:
    """Decodes and encodes the values of one topic. Belongs to one thread.

    Avro and Arrow values are decoded by their writer's schema, so the document has what was written. JSON and Protobuf
    values are decoded by the newest schema, with or without Confluent's framing.
    """

    def __init__(self, topic: str, schemas: TopicSchemas) -> None:
        """Raises ConfigError for a topic without schemas, for a wrong newest schema, and without its library."""
        if not schemas.versions:
            hint = f"Register one: `metamq topic schema register {topic} FILE`."
            raise ConfigError(f"topic {topic!r} has no registered schema", hint=hint)
        self._topic = topic
        self._versions = schemas.versions
        self._codecs: dict[int, DocumentCodec] = {}
        self._codec(len(self._versions))

    def knows_version(self, data: bytes) -> bool:
        """True if the value's version is one of ours, or if the value names none."""
        return self._version(data) in range(1, len(self._versions) + 1)

    def decode(self, data: bytes, rows_max: int = sys.maxsize) -> Any:
        """Returns the document of a value, which json.dumps takes. An Arrow value is the list of its rows: at most
        `rows_max`. Raises ValueError with the reason, and ConfigError for a wrong schema."""
        version = self._version(data)
        if not self.knows_version(data):
            raise ValueError(f"its schema has the version {version}, and the topic has {len(self._versions)}")
        try:
            schema = self._versions[version - 1]
            if schema.format == "arrow":
                return plain(self._rows(version, data, rows_max))
            is_avro = schema.format == "avro"
            codec = self._codec(version if is_avro else len(self._versions))
            body = SchemaFrame.body(data, has_indexes=bool(codec.indexes)) if is_avro or _is_framed(data) else data
            return plain(codec.decode(body))
        except MetamqError:
            raise
        except Exception as error:  # the libraries' errors are of many kinds
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise ValueError(" ".join(f"{kind}{error}".split())[:_PROBLEM_CHARS]) from None

    def encoder(self, version: int | None = None, framing: Literal["confluent"] | None = None) -> Encode:
        """Returns the function that encodes documents by a version, the newest by default. `framing`: as for a Topic.

        It raises ValueError, with the field. It takes the document's own text, too, if there is one: a JSON value keeps
        it. Raises ConfigError for an unknown version, and for Arrow.
        """
        count = len(self._versions)
        number = count if version is None else version
        if not 1 <= number <= count:
            hint = f"`metamq topic schema list {self._topic}` shows the versions."
            raise ConfigError(f"topic {self._topic!r} does not have version {number} of a schema", hint=hint)
        schema = self._versions[number - 1]
        if schema.format == "arrow":
            hint = "Send tables with Producer.send_table()."
            raise ConfigError(f"topic {self._topic!r} has Arrow values, which a line of JSON does not make", hint=hint)
        codec = self._codec(number)
        encode = _checked(schema) if schema.format == "json" else codec.encode
        is_framed = schema.format == "avro" or framing is not None
        head = b"\0" + number.to_bytes(4, "big") + codec.indexes if is_framed else b""

        def encode_framed(document: Any, text: bytes | None = None) -> bytes:
            body = encode(document)
            return head + (body if text is None or schema.format != "json" else text)

        return encode_framed

    def _version(self, data: bytes) -> int:
        """Returns the version that a value names; the newest for a value without a version."""
        if _is_framed(data):
            return int.from_bytes(data[1 : SchemaFrame.BYTES], "big")
        return len(self._versions)

    def _codec(self, version: int) -> DocumentCodec:
        if version not in self._codecs:
            self._codecs[version] = _codec_of(self._versions[version - 1])
        return self._codecs[version]

    def _rows(self, version: int, data: bytes, rows_max: int) -> Any:
        definition = self._versions[version - 1].definition
        codec = arrow_codec(self._topic, arrow_schema(definition))
        assert codec.learn is not None
        codec.learn({version: definition})
        rows = codec.decode(data)
        if rows.num_rows > 8 * len(data):  # columns of nulls have any number of rows without a byte
            raise ValueError(f"it has {rows.num_rows:,} rows in {len(data):,} bytes")
        return rows.slice(0, rows_max).to_pylist()


def _is_framed(data: bytes) -> bool:
    """True for Confluent's framing: no JSON, and no Protobuf message, begins with its zero byte."""
    return len(data) >= SchemaFrame.BYTES and data[0] == 0


def _codec_of(schema: Schema) -> DocumentCodec:
    if schema.format == "avro":
        return avro_documents(schema.definition)
    if schema.format == "protobuf":
        return protobuf_documents(schema.definition)
    if schema.format == "arrow":
        arrow_schema(schema.definition)
    return DocumentCodec(json.loads, _json_bytes)


def _json_bytes(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _checked(schema: Schema) -> Callable[[Any], bytes]:
    """Returns the encoder of JSON that fits a JSON Schema. Raises ConfigError without jsonschema."""
    jsonschema = library("jsonschema", "jsonschema")
    registry = library("referencing", "jsonschema").Registry()  # the default one loads references from other hosts
    definition = parse(schema.definition.encode())
    kind = jsonschema.validators.validator_for(definition, default=jsonschema.Draft202012Validator)
    validator = kind(definition, registry=registry)

    def encode(document: Any) -> bytes:
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(document))
        except Exception as problem:  # as a pattern or a reference that is wrong
            raise ConfigError(f"the JSON Schema checks no value: {problem}", hint="Register a correct one.") from None
        if error is not None:
            raise wrong_field(error.json_path.removeprefix("$").removeprefix("."), error.message[:_PROBLEM_CHARS])
        return _json_bytes(document)

    return encode
