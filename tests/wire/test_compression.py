"""Compression: a body costs no more than its header says, whatever it would decompress to."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import pytest

from metamq.errors import ConfigError, CorruptData
from metamq.wire.compression import Codec, codec_named, compress, decompress
from metamq.wire.limits import BATCH_BYTES_MAX

MEBIBYTE = 1024 * 1024
CODECS = [Codec.LZ4, Codec.ZSTD]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 1, 100_000, BATCH_BYTES_MAX])
def test_round_trip(codec: Codec, size: int) -> None:
    for plain in (bytes(size), random.Random(size).randbytes(size)):
        assert decompress(codec, compress(codec, plain), size) == plain


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_costs_what_its_header_says(codec: Codec) -> None:
    bomb = compress(codec, bytes(200 * MEBIBYTE))
    assert len(bomb) < MEBIBYTE
    tracemalloc.start()
    try:
        for size in (0, 1000, MEBIBYTE):
            with pytest.raises(CorruptData, match=rf"decompresses to {size + 1} bytes, but its header says {size}"):
                decompress(codec, bomb, size)
        assert tracemalloc.get_traced_memory()[1] < 4 * MEBIBYTE
    finally:
        tracemalloc.stop()


WINDOW = """
import resource
from backports import zstd
from metamq.errors import CorruptData
from metamq.wire.compression import Codec, decompress

parameter = zstd.CompressionParameter
wide = zstd.ZstdCompressor(options={parameter.window_log: 27, parameter.content_size_flag: 0})
frames = [wide.compress(bytes(1000), wide.FLUSH_BLOCK) for _ in range(1)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for frame in frames:
    try:
        decompress(Codec.ZSTD, frame, 1000)
    except CorruptData as error:
        print(error.reason)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_zstd_window_is_no_larger_than_a_batch() -> None:
    """A frame of a few bytes can ask for a window of 128 MiB; seen in a process of its own, whose peak is new."""
    if sys.version_info >= (3, 14):
        script = WINDOW.replace("from backports import zstd", "from compression import zstd")
    else:
        script = WINDOW
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    reason, grown = done.stdout.splitlines()
    assert "memory" in reason or "window" in reason.lower(), reason
    assert int(grown) < 4


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_bodies(codec: Codec) -> None:
    good = compress(codec, b"0123456789" * 100)
    for bad in (b"", b"junk", good[:-6], good[: len(good) // 2], good[1:]):
        with pytest.raises(CorruptData):
            decompress(codec, bad, 1000)
    for size in (0, 999, 1001):
        with pytest.raises(CorruptData):
            decompress(codec, good, size)


def test_a_codec_that_nobody_knows() -> None:
    for codec in (0, 3, 255):
        with pytest.raises(CorruptData, match=f"unknown codec {codec}"):
            decompress(codec, b"", 0)


def test_names() -> None:
    assert [codec_named(name) for name in (None, "none", "lz4", "ZSTD")] == [Codec.NONE, Codec.NONE, *CODECS]
    with pytest.raises(ConfigError, match="unknown compression 'snappy'") as caught:
        codec_named("snappy")
    assert caught.value.hint == "Choose one of: none, lz4, zstd."


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with pytest.raises(ConfigError, match=r"lz4 compression needs the package 'lz4.frame'. Install it with") as caught:
        codec_named("lz4")
    assert caught.value.hint == "Install it with: pip install lz4"
