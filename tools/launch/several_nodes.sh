#!/usr/bin/env bash
# Train on the GPUs of several machines. Run the same command on each of them:
#
#   tools/launch/several_nodes.sh 2 gpu01:29400 my-run hparams/ctc.yaml [--setting=value ...]
#   tools/launch/several_nodes.sh 1:4 gpu01:29400 my-run hparams/ctc.yaml   # elastic
#
# NODES is the number of machines, or MIN:MAX: a run of MAX machines that loses some, but not below MIN,
# goes on from its last checkpoint without them, and admits machines that start the command later.
# ENDPOINT is a free port of one machine, under a name that all can resolve. That machine keeps the list of
# the others: if it is lost, the run ends, and the same commands resume it. ID is a word that no other job on
# that port uses. All machines need the same files: the output folder, the data and its cache.
# If a machine's own name does not resolve on the others, set PET_LOCAL_ADDR to its address and, without
# GPUs, GLOO_SOCKET_IFNAME to its network interface.
#
# SIGTERM, SIGUSR1 or Ctrl-C on one machine ends all: they save and exit with 75. The same commands resume the run.
# In an elastic run only that machine leaves.
source "$(dirname -- "${BASH_SOURCE[0]}")/torchrun.sh"

[ $# -ge 4 ] || fail "usage: tools/launch/several_nodes.sh NODES|MIN:MAX ENDPOINT ID YAML [--setting=value ...]"
start --nnodes="$1" --rdzv_backend=c10d --rdzv_endpoint="$2" --rdzv_id="$3" -- "${@:4}"
