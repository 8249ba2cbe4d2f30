"""The type of a message's value: bytes, unless `encode=` or `decode=` change it.

The default (PEP 696) saves users an annotation. Type checkers know typing_extensions even if it is not installed;
nothing needs it at run time.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=bytes)
else:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["T"]
