"""Reward functions: loaded from `FILE.py:FUNCTION`, and called as TRL calls them.

    def reward(prompts, completions, **columns) -> list[float]

A completion is a text. If prompts are conversations, a completion is a list with the assistant's message.
"""

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.processes.failure import TrainingError
from megatron_lite.settings.grpo import Grpo

FORM = "give FILE.py:FUNCTION"
SMALLEST_STD = 1e-4
"""Added to a standard deviation before the division by it, as in TRL."""
SAME_STD = 1e-8
"""Rewards with a smaller standard deviation are the same."""
_ERRORS = (Exception, SystemExit)
"""A user's code may raise any error. By SystemExit, the run would end with status 0."""


@dataclass(frozen=True)
class Reward:
    """A reward function."""

    word: str
    """As the user named it."""
    name: str
    weight: float
    function: Callable[..., Any]

    def __call__(self, offered: Mapping[str, Sequence[Any]], count: int) -> list[float]:
        """Return the rewards of `count` completions. offered: the arguments by name.

        Raises TrainingError if the function raises, or returns anything else than `count` finite numbers.
        """
        try:
            returned = self.function(**self._accepted(offered))
            given = list(returned) if isinstance(returned, Iterable) else None
        except _ERRORS as error:
            raise TrainingError(f"--reward {self.word}: raised {_described(error)}") from error
        if given is None:
            raise TrainingError(
                f"--reward {self.word}: returned {returned!r:.60}; it has to return a list with a number for each completion"
            )
        if len(given) != count:
            raise TrainingError(
                f"--reward {self.word}: returned {len(given)} rewards for {count} completions; it has to return one for each"
            )
        for number, value in enumerate(given):
            if not _is_finite(value):
                raise TrainingError(
                    f"--reward {self.word}: returned {value!r:.60} for completion {number}; a reward has to be a finite number"
                )
        return [float(value) for value in given]

    def _accepted(self, offered: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments that the function takes."""
        parameters = inspect.signature(self.function).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return offered
        return {name: value for name, value in offered.items() if name in parameters}


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except Exception:  # a value of a user's class may raise any error
        return False


def _described(error: BaseException) -> str:
    """Return an error in one line, with the place that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {text}"


def load_rewards(grpo: Grpo) -> list[Reward]:
    """Load all functions of --reward. This runs the code of their files. Raises UsageError."""
    words = grpo.reward or ()
    weights = grpo.reward_weights or [1.0] * len(words)
    found = [_load(word, weight) for word, weight in zip(words, weights, strict=True)]
    names = [reward.name for reward in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--reward: two functions are named {name}; rename one of them")
    return found


def _load(word: str, weight: float) -> Reward:
    file, _, name = word.rpartition(":")
    if not file.endswith(".py") or not name:
        raise UsageError(f"--reward {word}: is no function of a file; {FORM}")
    module = _module(file)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--reward {word}: {file} has no function {name}")
    return Reward(word, name, weight, function)


@cache
def _module(file: str) -> ModuleType:
    """Return the module of a file. It may import modules beside it. Raises UsageError."""
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"--reward {file}: there is no such file; {FORM}")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    directory = str(path.parent.resolve())
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        spec.loader.exec_module(module)
    except _ERRORS as error:
        raise UsageError(f"--reward {file}: can't be loaded: {_described(error)}") from error
    return module


class Judged(NamedTuple):
    """Rewards compared with those of their group: float64 [completions], group after group."""

    advantages: Tensor
    silent: Tensor
    """1 if all completions of the group have the same reward, so that none has an advantage; else 0."""


def judge(rewards: Tensor, generations: int, scale: str) -> Judged:
    """Compare the completions of each group, as TRL does. rewards: float64 [completions]. scale: --scale-rewards."""
    grouped = rewards.view(-1, generations)
    own = grouped.std(1, keepdim=True)
    silent = (own < SAME_STD).expand_as(grouped)
    advantages = grouped - grouped.mean(1, keepdim=True)
    if scale != "none":
        deviation = rewards.std() if scale == "batch" else own
        advantages = advantages / (deviation + SMALLEST_STD)
    return Judged(advantages.flatten(), silent.flatten().double())
