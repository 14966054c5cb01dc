# shellcheck shell=bash
# Sourced by the launchers: goes to the root of the checkout, and starts train.py under torchrun,
# or another script where the first argument is one: tools/launch/one_node.sh my_train.py my.yaml
#
# What they choose can be chosen in the environment, as can any option of torchrun's (PET_ and its name):
#
#   PET_NPROC_PER_NODE   processes on this machine; else one a GPU, or one
#   PET_MAX_RESTARTS     how often all start again from the last checkpoint when one has died; else 3
#   OMP_NUM_THREADS      threads of each process; else the cores, shared out

set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

fail() {
    printf '%s\n' "$*" >&2
    exit 2
}

whole_number() {
    [[ $1 =~ ^[1-9][0-9]*$ ]]
}

# An environment that is active goes before that of the checkout.
find_environment() {
    if python -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' 2>/dev/null; then
        return
    fi
    [ -x .venv/bin/python ] || fail "Python must have torch installed, but $(command -v python || echo 'no python') has not," \
        "and there is no .venv here. Make it with tools/test, or activate your own environment."
    export PATH=$PWD/.venv/bin:$PATH
}

# Takes torchrun's own options, then `--`, then the YAML and what else the script is given. Signals
# reach the agent: it is exec'd.
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
    whole_number "$processes" ||
        fail "PET_NPROC_PER_NODE must be a number of processes, but is '$processes'. Set one, or unset it."
    cores=$(python -c 'from sbkit.base.machine import usable_cores; print(usable_cores())')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    exec python -m tools.launch.agent --nproc_per_node="$processes" \
        --max_restarts="${PET_MAX_RESTARTS:-3}" \
        --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "${options[@]}" "$script" "$@"
}
