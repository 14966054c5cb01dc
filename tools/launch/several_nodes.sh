#!/usr/bin/env bash
# Train on the GPUs of several machines: give the same command on each of them.
#
#   tools/launch/several_nodes.sh 2 gpu01:29400 my-run hparams/ctc.yaml [--knob=value ...]
#
# NODES is how many there are, ENDPOINT a free port of one of them, by the name that all know it by, and ID
# a word that no other job there uses. All need the same files: the output folder, the data and its cache.
# A machine whose name leads the others nowhere needs its address in PET_LOCAL_ADDR and, without GPUs, the
# network interface in GLOO_SOCKET_IFNAME.
#
# SIGTERM, SIGUSR1 and Ctrl-C on one: all save, and leave with 75; the same commands go on.
source "$(dirname -- "${BASH_SOURCE[0]}")/torchrun.sh"

[ $# -ge 4 ] || fail "usage: tools/launch/several_nodes.sh NODES ENDPOINT ID YAML [--knob=value ...]"
whole_number "$1" || fail "NODES must be a number of machines, not '$1'."
[[ $2 =~ ^[^:]+:[0-9]+$ ]] || fail "ENDPOINT must be NAME:PORT of one of the machines, not '$2'."
start --nnodes="$1" --rdzv_backend=c10d --rdzv_endpoint="$2" --rdzv_id="$3" -- "${@:4}"
