#!/usr/bin/env bash
# Scans and verifies checkpoints in the working directory, and writes their findings to FINDINGS/NUMBER-NAME.sarif.
#
#   check.sh PUBLIC_KEY FINDINGS CHECKPOINT...     PUBLIC_KEY may be - for checkpoints that nobody signed
#
# NUMBER is the place of the checkpoint on the command line, since two checkpoints may have the same name.
# Whoever writes to the checkpoints must not be able to write to PUBLIC_KEY, FINDINGS or this script.
# Exit status 1 if a checkpoint would run code, is damaged, or isn't as it was signed or written.

set -u
public_key=$1
findings=$2
shift 2
failed=0
number=0
here=$(pwd -P)
mkdir -p "$findings" || exit 1

for checkpoint in "$@"; do
  number=$((number + 1))
  # A link could lead to a checkpoint that was checked before, or out of the repository.
  case $(realpath "$checkpoint") in
    "$here" | "$here"/*) ;;
    *)
      echo "$checkpoint: is not in $here" >&2
      failed=1
      continue
      ;;
  esac
  megaconv scan "$checkpoint" --sarif "$findings/$number-$(basename "$checkpoint").sarif" || failed=1
  if [ "$public_key" != - ]; then
    megaconv verify "$checkpoint" --public-key "$public_key" --quiet || failed=1
  elif [ -f "$checkpoint/megaconv.json" ]; then
    megaconv verify "$checkpoint" --quiet || failed=1
  fi
done

exit $failed
