"""The scorers of `data score`: a classifier of transformers, a function of the user, or the Perspective API."""

import importlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from megaconv.errors import CheckpointError, UsageError
from megaconv.extras import require_torch
from megatron_lite.data.packages import package

Scorer = Callable[[Sequence[str]], list[dict[str, float] | None]]
"""Texts -> the scores of each by name; None for a text that can't be scored."""
KEY = "PERSPECTIVE_API_KEY"
_RETRIES = 5
_BUSY = (429, 500, 502, 503, 504)
"""Statuses after which a request is sent again."""
_REFUSED = (
    "COMMENT_TOO_LONG",
    "COMMENT_EMPTY",
    "LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE",
    "LANGUAGE_DETECTION_FAILED",
)
"""Errors of Perspective that are about the text. Others, such as those of a wrong key, concern every text."""


@dataclass(frozen=True)
class ScorerOptions:
    """Options of the scorers; the fields are flags of the command."""

    batch_size: int = 32
    activation: str | None = None
    max_tokens: int = 512
    attributes: tuple[str, ...] = ("TOXICITY",)
    requests_per_second: float = 1.0
    perspective_url: str = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range."""
        if self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size} must be 1 or more")
        if self.max_tokens < 8:
            raise UsageError(f"--max-tokens {self.max_tokens} must be 8 or more")
        if not self.requests_per_second > 0:
            raise UsageError(f"--requests-per-second {self.requests_per_second} must be above 0")


def make_scorer(name: str, options: ScorerOptions) -> Scorer:
    """Return the scorer that `--scorer` names. Raises UsageError."""
    if name == "perspective":
        return Perspective(options).scores
    kind, colon, rest = name.partition(":")
    if not colon or not rest:
        raise UsageError(
            f"--scorer {name}: give transformers:MODEL, MODULE:FUNCTION, or perspective"
        )
    if kind == "transformers":
        model, _, label = rest.partition("#")
        return Classifier(model, label or None, options).scores
    return _function(kind, rest)


def _function(module: str, name: str) -> Scorer:
    """Return a function of a module, which may lie in the current directory."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--scorer {module}:{name}: can't be imported: {error}") from error
    if not callable(found):
        raise UsageError(f"--scorer {module}:{name}: is not a function")

    def scores(texts: Sequence[str]) -> list[dict[str, float] | None]:
        try:
            return list(found(texts))
        except Exception as error:  # a user's function may raise anything
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"--scorer {module}:{name}: raised {what}") from error

    return scores


class Classifier:
    """A classifier of transformers (AutoModelForSequenceClassification). Code beside the model is never run."""

    def __init__(self, path: str, label: str | None, options: ScorerOptions) -> None:
        require_torch("megatron-lite data score", "train,data")
        transformers = package("transformers", f"--scorer transformers:{path}")
        transformers.utils.logging.disable_progress_bar()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            first_line = str(error).splitlines()[0]
            raise UsageError(
                f"--scorer transformers:{path}: can't be read: {first_line}"
            ) from error
        self._model = model.eval()
        self._labels: dict[int, str] = dict(model.config.id2label)
        if label is not None and label not in self._labels.values():
            known = ", ".join(self._labels.values())
            raise UsageError(
                f"--scorer transformers:{path}: has no label {label}; there are {known}"
            )
        self._label = label
        self._sigmoid = (options.activation or self._own_activation()) == "sigmoid"
        self._batch_size = options.batch_size
        """The most windows that the model computes at once: a long text has thousands."""
        self._max_tokens = min(options.max_tokens, self._tokenizer.model_max_length)

    def _own_activation(self) -> str:
        """The rule of transformers' text-classification pipeline."""
        multi_label = self._model.config.problem_type == "multi_label_classification"
        return "sigmoid" if multi_label or len(self._labels) == 1 else "softmax"

    def scores(self, texts: Sequence[str]) -> list[dict[str, float] | None]:
        """Return the probability of each label; of a text with several windows, the highest."""
        import torch

        windows, owners = self._windows(texts)
        size, parts = self._batch_size, []
        with torch.inference_mode():
            for first in range(0, len(owners), size):
                some = {name: values[first : first + size] for name, values in windows.items()}
                parts.append(self._model(**some).logits.float())
        logits = torch.cat(parts)
        values = (logits.sigmoid() if self._sigmoid else logits.softmax(-1)).tolist()
        rows_of_text: list[list[list[float]]] = [[] for _ in texts]
        for row, owner in zip(values, owners, strict=True):
            rows_of_text[owner].append(row)
        return [self._highest(rows) for rows in rows_of_text]

    def _highest(self, rows: list[list[float]]) -> dict[str, float]:
        """Return the highest probability of each label. rows: of the windows of one text."""
        highest = [max(column) for column in zip(*rows, strict=True)]
        scores = {self._labels[place]: value for place, value in enumerate(highest)}
        return scores if self._label is None else {self._label: scores[self._label]}

    def _windows(self, texts: Sequence[str]) -> tuple[Any, list[int]]:
        """Return the inputs of all windows, and the number of the text of each window."""
        encoded = self._tokenizer(
            list(texts), truncation=True, max_length=self._max_tokens, padding=True,
            return_overflowing_tokens=True, return_tensors="pt",
        )  # fmt: skip
        owners = encoded.pop("overflow_to_sample_mapping", None)
        if owners is None:  # a tokenizer without windows truncates
            encoded.pop("overflowing_tokens", None)
            encoded.pop("num_truncated_tokens", None)
            return encoded, list(range(len(texts)))
        return encoded, owners.tolist()


class Perspective:
    """The Perspective API: one request for each text."""

    def __init__(self, options: ScorerOptions) -> None:
        self._key = os.environ.get(KEY, "")
        if not self._key:
            raise UsageError(f"--scorer perspective: set ${KEY} to the key of the service")
        self._options = options
        self._next_s = 0.0
        """Time before which no request is sent."""

    def scores(self, texts: Sequence[str]) -> list[dict[str, float] | None]:
        """Return the attributes of each text in lower case; None if the service refuses the text."""
        return [self._of(text) for text in texts]

    def _of(self, text: str) -> dict[str, float] | None:
        body = {
            "comment": {"text": text}, "doNotStore": True,
            "requestedAttributes": {name: {} for name in self._options.attributes},
        }  # fmt: skip
        answer = self._sent(json.dumps(body).encode())
        if answer is None:
            return None
        try:
            scores = answer["attributeScores"]
            return {
                name.lower(): float(scores[name]["summaryScore"]["value"])
                for name in self._options.attributes
            }
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._options.perspective_url}: the answer has no {error}"
            ) from error

    def _sent(self, body: bytes) -> Any:
        """Return the answer; None for a text that the service refuses. Raises CheckpointError."""
        url = self._options.perspective_url
        headers = {"Content-Type": "application/json", "X-Goog-Api-Key": self._key}
        for attempt in range(_RETRIES):
            self._wait()
            request = urllib.request.Request(url, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                reason = _body(error)
                if error.code == 400 and any(name in reason for name in _REFUSED):
                    return None
                last = f"status {error.code}{_message(reason)}"
                if error.code not in _BUSY:
                    break
            except (OSError, ValueError) as error:
                last = str(error)
            self._next_s = time.monotonic() + 2**attempt / self._options.requests_per_second
        raise CheckpointError(f"{url}: {last}; --resume continues with this text")

    def _wait(self) -> None:
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + 1 / self._options.requests_per_second


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")
    except (OSError, HTTPException):
        return ""


def _message(answer: str) -> str:
    """Return the message of an error of the service, behind a colon; nothing if there is none."""
    try:
        return f": {json.loads(answer)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return ""
