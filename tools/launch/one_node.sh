#!/usr/bin/env bash
# Train on the GPUs of this machine.
#
#   tools/launch/one_node.sh hparams/ctc.yaml [--setting=value ...]
#
# On SIGTERM, SIGUSR1 or Ctrl-C it saves a checkpoint and exits with code 75; the same command resumes.
source "$(dirname -- "${BASH_SOURCE[0]}")/torchrun.sh"

[ $# -ge 1 ] || fail "usage: tools/launch/one_node.sh YAML [--setting=value ...]"
# The name of this machine may resolve to no address.
export PET_LOCAL_ADDR=${PET_LOCAL_ADDR:-127.0.0.1} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
start --standalone -- "$@"
