# Sourced by the tools: goes to the root of the checkout and makes its `.venv`, once.
#
#   environment                    installs what a run needs, in the versions of constraints.txt
#   environment test,export        and these extras of setup.cfg
#   environment test,export lowest in `.venv-lowest`, with the lowest versions that setup.cfg allows
#   environment test,export newest in `.venv-newest`, with the newest
#
# and puts it first in PATH: `python`, `torchrun` and `sbkit` are its own. uv installs where it is
# present, else pip.

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
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        grep -qF -- " $root/$venv" "$venv/pyvenv.cfg" && supported "$venv/bin/python"
}

create() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python must come with the modules venv and ensurepip, but has not both." \
            "Install them, on Debian or Ubuntu: apt-get install" \
            "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    printf 'making %s with %s\n' "$venv" "$("$python" --version)"
    "$python" -m venv --clear "$venv"
}

# The mark of an installation: it changes with what these files ask for.
stamp() {
    printf '%s/installed-%s\n' "$venv" \
        "$({ cat setup.cfg pyproject.toml constraints.txt && printf '%s' "$1"; } | sha256sum | cut -c -64)"
}

install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --use-pep517 "$@"
    fi
}

# The lowest or the newest versions of setup.cfg's ranges, those of their own dependencies included.
resolve() {
    local extra options=(--upgrade)
    command -v uv >/dev/null || install uv
    [ "$2" = newest ] || options+=(--resolution lowest-direct)
    for extra in ${1//,/ }; do
        options+=(--extra "$extra")
    done
    PATH=$venv/bin:$PATH uv pip compile setup.cfg --quiet --no-header --no-annotate \
        --python "$venv/bin/python" "${options[@]}" --output-file "$venv/versions.txt"
}

environment() {
    local extras=${1:+[$1]} versions=${2:-} constraints=constraints.txt
    venv=.venv${versions:+-$versions}
    usable || create
    if [ ! -e "$(stamp "$extras")" ]; then
        printf 'installing sbkit%s: some minutes and 5 GB the first time\n' "$extras"
        if [ -n "$versions" ]; then
            resolve "$1" "$versions"
            constraints=$venv/versions.txt
        fi
        install --constraint "$constraints" --editable ".$extras"
        touch -- "$(stamp "$extras")" "$(stamp "")"
    fi
    export PATH=$root/$venv/bin:$PATH
}
