"""The loss scale of fp16: as large as possible without overflow. Same algorithm as Megatron's DynamicGradScaler."""

from collections.abc import Mapping
from typing import Any

from megatron_lite.settings.options import LossScale


class LossScaler:
    """Tracks `scale`, the factor for the loss. It stays 1 if the options are None."""

    def __init__(self, options: LossScale | None) -> None:
        self.options = options
        self.scale = 1.0 if options is None else options.constant or options.initial
        self._good_steps = 0
        self._overflows_left = 0 if options is None else options.hysteresis

    def update(self, overflow: bool) -> None:
        """Adjust the scale. Call it after each step."""
        options = self.options
        if options is None or options.constant is not None:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, options.minimum)
            return
        self._good_steps += 1
        if self._good_steps == options.window:
            self._good_steps, self._overflows_left = 0, options.hysteresis
            self.scale *= 2

    def state(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.options is not None and self.options.constant is None:
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
            self._overflows_left = int(state["overflows_left"])
