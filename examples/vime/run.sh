#!/usr/bin/env bash
# Your vime training command, with streamfold generating. All other options are yours: give them to this script.
#
#     VIME=/path/to/vime ./run.sh --hf-checkpoint ... --prompt-data ... --rollout-batch-size ...
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${VIME:?set VIME to your checkout of vime}"

exec python3 "$VIME/train.py" \
  --custom-generate-function-path streamfold.vime.generate_streaming \
  --custom-config-path "$here/streamfold.yaml" \
  --partial-rollout \
  "$@"
