"""Prints a table of the lines and branches that a run of the tests reached, by folder; `./dev test --coverage` runs it.

.venv/bin/coverage json -o REPORT && .venv/bin/python .ci/coverage_by_folder.py REPORT
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path


def main() -> None:
    """Reads the JSON report of coverage.py."""
    folders: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, file in json.loads(Path(sys.argv[1]).read_text())["files"].items():
        counts = {key: value for key, value in file["summary"].items() if isinstance(value, int)}
        for folder in (str(Path(name).parent), "total"):
            folders[folder].update(counts)
    print(f"{'folder':<28}{'lines':>16}{'branches':>16}")
    for folder, sums in sorted(folders.items(), key=lambda one: (one[0] == "total", one[0])):
        lines = share(sums["covered_lines"], sums["num_statements"])
        print(f"{folder:<28}{lines:>16}{share(sums['covered_branches'], sums['num_branches']):>16}")


def share(covered: int, count: int) -> str:
    """Returns a part of a number, in percent."""
    return f"{covered / count:.1%} of {count}" if count else "-"


if __name__ == "__main__":
    main()
