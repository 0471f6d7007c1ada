#!/bin/sh
# Runs the checks of tests/stores/test_real.py against a bucket of yours:
#
#     tests/stores/real.sh s3://BUCKET [PREFIX]         boto3's own credentials, region and endpoint
#     tests/stores/real.sh gs://BUCKET [PREFIX]         google-auth's credentials
#     tests/stores/real.sh az://CONTAINER [PREFIX]      AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT and credentials
#
# The script writes objects below PREFIX (megaconv-tests by default), and deletes them at its end.
set -eu
bucket=${1:?"usage: tests/stores/real.sh s3://BUCKET|gs://BUCKET|az://CONTAINER [PREFIX]"}
prefix=${2:-megaconv-tests}
MEGACONV_TEST_BUCKET=$bucket MEGACONV_TEST_PREFIX=$prefix exec "${PYTHON:-python}" -m pytest -p no:cacheprovider \
  tests/stores/test_real.py
