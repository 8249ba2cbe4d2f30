"""Functions and objects of the user, each at a path like `shop.billing:bill`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from operator import attrgetter
from types import ModuleType
from typing import Any

from metamq.errors import ConfigError, MetamqError

SEPARATOR = ":"
_DEBUG_HINT = "Mend the module, and run the command again. With --debug it prints the stack trace."


def load(path: str) -> Any:
    """Imports the object at "module:name". Raises ConfigError, and each MetamqError that the import raises."""
    module_name, _, name = path.partition(SEPARATOR)
    if not module_name or not name:
        raise ConfigError(
            f"{path!r} is not MODULE:NAME", hint="Write it like shop.billing:bill, for `bill` in shop/billing.py."
        )
    module = import_module(module_name, path)
    try:
        return attrgetter(name)(module)
    except AttributeError:
        near = difflib.get_close_matches(name, dir(module), 1)
        found = f"Did you mean {module_name}:{near[0]}? " if near else ""
        raise ConfigError(
            f"the module {module_name} has no {name!r}", hint=f"{found}The module is {_file_of(module)}."
        ) from None


def import_module(name: str, path: str) -> ModuleType:
    """Imports a module, for the object at a path; the command's folder counts too. Raises as load()."""
    if (here := os.getcwd()) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except MetamqError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"there is no module {missing!r}, for {path}",
                hint=f"The command looks in its folder, {os.getcwd()}, and in PYTHONPATH. Start it beside {missing}.",
            ) from None
        raise ConfigError(
            f"the module {name} imports {missing}, which is not there",
            hint="Install the package that has it into the environment of metamq.",
        ) from error
    except Exception as error:
        raise ConfigError(f"the import of {name} failed: {type(error).__name__}: {error}", hint=_DEBUG_HINT) from error


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "a part of Python"
