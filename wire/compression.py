"""Codecs for batch bodies. The codec's number is stored in the batch: numbers are never reused."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable
from typing import Any

from metamq.errors import ConfigError, CorruptData
from metamq.wire.limits import BATCH_BYTES_MAX

Buffer = bytes | bytearray | memoryview


class Codec(enum.IntEnum):
    """The compression of a batch body."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


def codec_named(name: str | None) -> Codec:
    """The codec of a user's setting (`None`, "none", "lz4", "zstd").

    Raises ConfigError for an unknown name, or if the package of the codec is not installed.
    """
    try:
        codec = Codec[(name or "none").upper()]
    except (KeyError, AttributeError):
        known = ", ".join(c.name.lower() for c in Codec)
        raise ConfigError(f"unknown compression {name!r}", hint=f"Choose one of: {known}.") from None
    if codec is not Codec.NONE:
        _module(codec)
    return codec


def _module(codec: Codec) -> Any:
    if codec is Codec.LZ4:
        name, package = "lz4.frame", "lz4"
    else:
        name, package = ("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"), "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{codec.name.lower()} compression needs the package {name!r}",
            hint=f"Install it with: pip install {package}",
        ) from None


def compress(codec: Codec, body: Buffer) -> bytes:
    """Compresses the body. `codec` is not NONE."""
    module = _module(codec)
    compressed: bytes = module.compress(bytes(body))
    return compressed


def decompress(codec: int, body: Buffer, size: int) -> bytes:
    """The body from before compress(). `size` is its length; the caller has checked it against the limits.

    It decompresses at most `size` + 1 bytes, whatever the body says. Raises CorruptData if the result does not have
    `size` bytes, ConfigError if the package of the codec is not installed.
    """
    if codec not in (Codec.LZ4, Codec.ZSTD):
        raise CorruptData("batch body", f"unknown codec {codec}")
    module = _module(Codec(codec))
    make: Callable[[], Any] = module.LZ4FrameDecompressor if codec == Codec.LZ4 else lambda: _zstd(module)
    try:
        plain: bytes = make().decompress(bytes(body), size + 1)
    except Exception as error:  # each codec has an error class of its own
        raise CorruptData("batch body", f"{Codec(codec).name.lower()}: {error}") from error
    if len(plain) != size:
        raise CorruptData("batch body", f"decompresses to {len(plain)} bytes, but its header says {size}")
    return plain


def _zstd(module: Any) -> Any:
    """Limits the window to a batch's size: a frame may ask for 128 MiB before its first byte is decompressed."""
    window = module.DecompressionParameter.window_log_max
    return module.ZstdDecompressor(options={window: (BATCH_BYTES_MAX - 1).bit_length()})
