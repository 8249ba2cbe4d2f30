"""The fixtures that pytest-asyncio runs. `plugin.py` imports them if pytest-asyncio is there."""

from __future__ import annotations

import pytest_asyncio

from metamq.testing import aio_clients

_metamq_asyncio_producer = pytest_asyncio.fixture(aio_clients.producer)
_metamq_asyncio_consumer = pytest_asyncio.fixture(aio_clients.consumer)
