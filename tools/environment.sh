# The tools source this file. It goes to the root of the checkout and defines `environment`, which
# makes a virtual environment unless it exists, and puts it first in PATH:
#
#   environment                      .venv with sbkit, in the versions of constraints.txt
#   environment test,export          .venv with these extras of setup.cfg, too
#   environment test,export lowest   .venv-lowest, with the lowest versions that setup.cfg allows
#   environment test,export newest   .venv-newest, with the newest versions
#
# $python chooses the interpreter: a version such as 3.13, also one of pyenv's, or a path.
# uv installs the packages if it is present, otherwise pip.

set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
# Container images set this variable. Each process would then compile sbkit's 300 files again, in 0.7
# of the 5.4 s of its start.
unset PYTHONDONTWRITEBYTECODE

fail() {
    printf '%s\n' "$*" >&2
    exit 2
}

supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2>/dev/null
}

find_python() {
    local name names=(python3 python3.13 python3.12 python3.11)
    if [ -n "${python:-}" ]; then
        names=("$python" "python$python" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$python"*/bin/python)
    fi
    for name in "${names[@]}"; do
        if supported "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    [ -z "${python:-}" ] || fail "$python is no Python 3.11, 3.12 or 3.13 of this machine."
    fail "sbkit needs Python 3.11, 3.12 or 3.13, but this machine has" \
        "$(python3 --version 2>/dev/null || echo 'no python3'). On Debian or Ubuntu: apt-get install python3-venv"
}

# The scripts of a .venv contain its path, so it is useless after the checkout was copied or moved.
usable() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        grep -qF -- " $root/$venv" "$venv/pyvenv.cfg" && supported "$venv/bin/python" &&
        { [ -z "${python:-}" ] || [ "$("$venv/bin/python" --version)" = "$("$(find_python)" --version)" ]; }
}

create() {
    local interpreter
    interpreter=$(find_python)
    "$interpreter" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$interpreter lacks the module venv or ensurepip. On Debian or Ubuntu: apt-get install" \
            "$("$interpreter" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    printf 'making %s with %s\n' "$venv" "$("$interpreter" --version)"
    "$interpreter" -m venv --clear "$venv"
}

# Names the file that marks a finished installation; changed requirements give another name.
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

# Writes the lowest or the newest versions that setup.cfg allows to $venv/versions.txt, with their
# dependencies: resolve EXTRAS lowest|newest
resolve() {
    local options=(--upgrade)
    [ "$2" = newest ] || options+=(--resolution lowest-direct)
    compile "$1" --python "$venv/bin/python" "${options[@]}" --output-file "$venv/versions.txt"
}

# Runs `uv pip compile` on setup.cfg with extras: compile EXTRAS [OPTION ...]
compile() {
    local extra extras=()
    command -v uv >/dev/null || install uv
    for extra in ${1//,/ }; do
        extras+=(--extra "$extra")
    done
    PATH=$venv/bin:$PATH uv pip compile setup.cfg --quiet --no-header --no-annotate "${extras[@]}" "${@:2}"
}

environment() {
    local extras=${1:+[$1]} versions=${2:-} constraints=constraints.txt
    venv=.venv${versions:+-$versions}
    usable || create
    if [ ! -e "$(stamp "$extras")" ]; then
        printf 'installing sbkit%s: the first time takes some minutes and up to 7 GB\n' "$extras"
        if [ -n "$versions" ]; then
            resolve "$1" "$versions"
            constraints=$venv/versions.txt
        fi
        install --constraint "$constraints" --editable ".$extras"
        touch -- "$(stamp "$extras")" "$(stamp "")"
    fi
    export PATH=$root/$venv/bin:$PATH
}
