"""The settings of the Hub's client in environment variables, checked before huggingface_hub reads them at its import."""

import os

from megaconv.errors import UsageError

_ANSWER, _DOWNLOAD = "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"
_DEFAULT_SECONDS = "10"
_ENDPOINT, _TOKEN = "HF_ENDPOINT", "HF_TOKEN"


def answer_seconds() -> float:
    """Seconds that the Hub has for an answer.

    Call it before the import of huggingface_hub, which ends with a stack trace if a setting is wrong.
    Raises UsageError for a setting that the client can't use.
    """
    os.environ.setdefault(_ANSWER, _DEFAULT_SECONDS)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    for name in (_ANSWER, _DOWNLOAD):
        value = os.environ.get(name, _DEFAULT_SECONDS)
        if not value.isdecimal() or not int(value):
            raise UsageError(f"{name}={value!r}: expected a number of whole seconds, such as 10")
    endpoint = os.environ.get(_ENDPOINT, "https://")
    if not endpoint.startswith(("https://", "http://")):
        raise UsageError(
            f"{_ENDPOINT}={endpoint!r}: expected an address such as https://huggingface.co; correct it, or unset it"
        )
    if not os.environ.get(_TOKEN, "").isascii():
        raise UsageError(f"{_TOKEN}: has characters that no token has; copy the token again")
    return float(os.environ[_ANSWER])
