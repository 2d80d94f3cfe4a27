#!/usr/bin/env bash
# Train with torchtitan, in an environment made on the first call (see environment.sh).
#
#   ./run_train.sh                                    the debug PaTH model
#   NGPU=4 CONFIG_FILE=configs/other.toml LOG_RANK=0,1 ./run_train.sh --training.steps=20
#
#   NGPU         ranks (default: every GPU, or 2 without one)
#   CONFIG_FILE  torchtitan TOML (default: configs/llama3_debug_path.toml), relative to the caller's
#                directory if it is there, else to this file's
#   LOG_RANK     ranks whose output is shown (default: 0)
#   arguments    passed to torchtitan.train, over the TOML

set -euo pipefail
if [[ -n "${NGPU:-}" && ! "$NGPU" =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU must be a positive integer, got '$NGPU'" >&2
    exit 1
fi
if [[ "${CONFIG_FILE:-/}" != /* && -f "$CONFIG_FILE" ]]; then
    CONFIG_FILE="$PWD/$CONFIG_FILE"
fi
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./environment.sh

CONFIG_FILE="${CONFIG_FILE:-configs/llama3_debug_path.toml}"
LOG_RANK="${LOG_RANK:-0}"
NGPU="${NGPU:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')}"

cores="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$NGPU" \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
    -m torchtitan.train --job.config_file "$CONFIG_FILE" "$@"
