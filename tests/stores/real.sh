#!/bin/sh
# Runs the checks of tests/stores against a bucket of yours, with boto3's own credentials, region and endpoint:
#
#     tests/stores/real.sh BUCKET [PREFIX]
#
# The script writes objects below PREFIX (megaconv-tests by default), and deletes them at its end.
set -eu
bucket=${1:?"usage: tests/stores/real.sh BUCKET [PREFIX]"}
prefix=${2:-megaconv-tests}
MEGACONV_TEST_BUCKET=$bucket MEGACONV_TEST_PREFIX=$prefix exec "${PYTHON:-python}" -m pytest -q -p no:cacheprovider \
  tests/stores/test_real.py
