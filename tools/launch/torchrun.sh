# shellcheck shell=bash
# Sourced by the launchers: goes to the root of the checkout, and starts train.py under torchrun.
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

# Takes torchrun's own options, train.py, and its arguments. Signals reach the agent: it is exec'd.
start() {
    local cores processes
    processes=${PET_NPROC_PER_NODE:-$(python -c 'import torch; print(torch.accelerator.device_count() or 1)')}
    whole_number "$processes" ||
        fail "PET_NPROC_PER_NODE must be a number of processes, but is '$processes'. Set one, or unset it."
    cores=$(nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    exec python -m tools.launch.agent --nproc_per_node="$processes" \
        --max_restarts="${PET_MAX_RESTARTS:-3}" \
        --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$@"
}
