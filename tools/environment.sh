# Sourced by the tools: goes to the root of the checkout and makes its `.venv`, once.
#
#   environment                installs what a run needs
#   environment test,export    and these extras of setup.cfg
#
# and puts it first in PATH: `python`, `torchrun` and `sbkit` are its own.

set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
# Images of containers set it, and each process compiles sbkit's 300 files again (0.7 s of 5.4).
unset PYTHONDONTWRITEBYTECODE

fail() {
    printf '%s\n' "$*" >&2
    exit 2
}

supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2>/dev/null
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if supported "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "sbkit needs Python 3.11, 3.12 or 3.13, but here is" \
        "$(python3 --version 2>/dev/null || echo 'no python3'). Install one of them, on Debian or Ubuntu: apt-get install python3-venv"
}

# A copied or moved checkout holds a .venv whose scripts still call the old place.
usable() {
    .venv/bin/python -m pip --version >/dev/null 2>&1 &&
        grep -qF -- " $root/.venv" .venv/pyvenv.cfg && supported .venv/bin/python
}

create() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python must come with the modules venv and ensurepip, but has not both." \
            "Install them, on Debian or Ubuntu: apt-get install" \
            "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    printf 'making .venv with %s\n' "$("$python" --version)"
    "$python" -m venv --clear .venv
}

# The mark of an installation: it changes with what setup.cfg and pyproject.toml ask for.
stamp() {
    printf '.venv/installed-%s\n' \
        "$({ cat setup.cfg pyproject.toml && printf '%s' "$1"; } | sha256sum | cut -c -64)"
}

environment() {
    local extras=${1:+[$1]}
    usable || create
    if [ ! -e "$(stamp "$extras")" ]; then
        printf 'installing sbkit%s: some minutes and 5 GB the first time\n' "$extras"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 --editable ".$extras"
        touch -- "$(stamp "$extras")" "$(stamp "")"
    fi
    export PATH=$root/.venv/bin:$PATH
}
