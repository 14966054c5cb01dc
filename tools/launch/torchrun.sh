# shellcheck shell=bash
# The launchers source this file. It goes to the root of the checkout and defines `start`, which runs
# train.py under torchrun, or another script: tools/launch/one_node.sh my_train.py my.yaml
#
# Environment variables change the defaults, and set any other option of torchrun (PET_ and its name):
#
#   PET_NPROC_PER_NODE   processes on this machine; default: one for each GPU, or one
#   PET_MAX_RESTARTS     restarts of all processes from the last checkpoint after one died; default: 3;
#                        given back after an hour of work
#   OMP_NUM_THREADS      threads of each process; default: an equal share of the cores

set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

fail() {
    printf '%s\n' "$*" >&2
    exit 2
}

# Puts the .venv of the checkout first in PATH, unless the active Python has torch.
find_environment() {
    if python -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' 2>/dev/null; then
        return
    fi
    [ -x .venv/bin/python ] || fail "The active Python ($(command -v python || echo none)) has no torch, and there is no" \
        ".venv here. Make it with tools/test, or activate an environment with torch."
    export PATH=$PWD/.venv/bin:$PATH
}

# start [TORCHRUN OPTION ...] -- [SCRIPT] YAML [--setting=value ...]
# `exec` replaces the shell by the agent, so that signals reach the agent.
start() {
    local cores processes options=() script=train.py
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    find_environment
    if [[ ${1:-} == *.py ]]; then
        script=$1
        shift
    fi
    processes=${PET_NPROC_PER_NODE:-$(python -c 'import torch; print(torch.accelerator.device_count() or 1)')}
    cores=$(python -c 'from sbkit.base.machine import usable_cores; print(usable_cores())')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    exec python -m tools.launch.agent --nproc_per_node="$processes" \
        --max_restarts="${PET_MAX_RESTARTS:-3}" \
        --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "${options[@]}" "$script" "$@"
}
