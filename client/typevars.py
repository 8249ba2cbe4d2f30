"""The type of a message's value: bytes, unless `encode=` or `decode=` make it another.

The default (PEP 696) spares users an annotation. Type checkers know typing_extensions whether it is installed or not;
at run time nothing needs it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=bytes)
else:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["T"]
