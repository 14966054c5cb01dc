#!/usr/bin/env bash
# Train on the GPUs of this machine.
#
#   tools/launch/one_node.sh hparams/ctc.yaml [--knob=value ...]
#
# SIGTERM, SIGUSR1 and Ctrl-C: it saves, and leaves with 75; the same command goes on.
source "$(dirname -- "${BASH_SOURCE[0]}")/torchrun.sh"

[ $# -ge 1 ] || fail "usage: tools/launch/one_node.sh YAML [--knob=value ...]"
start --standalone -- "$@"
