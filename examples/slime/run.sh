#!/usr/bin/env bash
# Your slime training command, with streamfold generating. All other options are yours: give them to this script.
#
#     SLIME=/path/to/slime ./run.sh --hf-checkpoint ... --prompt-data ... --rollout-batch-size ...
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${SLIME:?set SLIME to your checkout of slime}"

exec python3 "$SLIME/train.py" \
  --custom-generate-function-path streamfold.slime.generate_streaming \
  --custom-config-path "$here/streamfold.yaml" \
  --partial-rollout \
  "$@"
