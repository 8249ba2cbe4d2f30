"""The common base of the asyncio Producer and Consumer: they are created first and opened later, in their loop."""

from __future__ import annotations

from typing import Any

from metamq.errors import ConfigError


class OpenedLater:
    """A client whose `_core` is created by open(). All methods need the core."""

    _opened = False

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name == "_core":
            hint = f"Use `async with {kind}(...)`, or `await open()` first."
            raise ConfigError(f"this {kind} is not open", hint=hint)
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    def _open_once(self) -> None:
        """Raises ConfigError on the second call."""
        if self._opened:
            raise ConfigError(f"this {type(self).__name__} was opened before", hint="Make another one.")
        self._opened = True
