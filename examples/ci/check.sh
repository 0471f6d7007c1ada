#!/usr/bin/env bash
# Scans and verifies checkpoints, and writes findings to sarif/NAME.sarif. NAME is the path, with - for each /.
#
#   check.sh PUBLIC_KEY CHECKPOINT...     PUBLIC_KEY may be - for checkpoints that nobody signed
#
# Exit status 1 if a checkpoint would run code, is damaged, or isn't as it was signed or written.

set -u
public_key=$1
shift
failed=0
mkdir -p sarif

for checkpoint in "$@"; do
  megaconv scan "$checkpoint" --sarif "sarif/${checkpoint//\//-}.sarif" || failed=1
  if [ "$public_key" != - ]; then
    megaconv verify "$checkpoint" --public-key "$public_key" --quiet || failed=1
  elif [ -f "$checkpoint/megaconv.json" ]; then
    megaconv verify "$checkpoint" --quiet || failed=1
  fi
done

exit $failed
