#!/usr/bin/env bash
# Your miles training command, with streamfold generating. All other options are yours: give them to this script.
#
#     MILES=/path/to/miles ./run.sh --hf-checkpoint ... --prompt-data ... --rollout-batch-size ...
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MILES:?set MILES to your checkout of miles}"

exec python3 "$MILES/train.py" \
  --custom-generate-function-path streamfold.miles.generate_streaming \
  --custom-config-path "$here/streamfold.yaml" \
  --partial-rollout \
  "$@"
