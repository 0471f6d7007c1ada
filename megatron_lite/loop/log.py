"""What a run reports: a line per logged step, the same figures as JSON lines, TensorBoard events or a W&B run.

MFU is counted as published: a token costs 6 N + 12 L h s operations (N weights that are multiplied, which leaves tables
that are looked up out; L layers, h = heads x head size, s tokens of a sequence; attention not halved for its mask), and
what is recomputed doesn't count.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.table import canonical_shapes
from megatron_lite.models.preference import FIGURES
from megatron_lite.settings.config import Logging

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "B200": 2250.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0}
"""Dense bf16 operations per second, by a word of the device's name (NVIDIA's data sheets)."""


def flops_per_token(config: ModelConfig, seq: int, decoder_seq: int = 0, *, frozen: bool = False) -> float:
    """Forward and backward. frozen: weights have no gradients (4 N for 6 N); adapters beside them aren't counted.

    decoder_seq: of a T5, for each of whose encoder's tokens the decoder's share is counted along.
    """
    if config.encoder.layers:
        return _of_two_stacks(config, seq, decoder_seq)
    looked_up = {"positions.weight", "token_types.weight"} | (set() if config.tie_embeddings else {"embed.weight"})
    weights, used = 0.0, config.experts.per_token / max(config.experts.count, 1)
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        if len(shape) == 2 and name not in looked_up:
            times = used if ".mlp.experts." in name else 1.0 + config.mtp_layers if name == "head.weight" else 1.0
            weights += shape[0] * shape[1] * times
    layers = config.layer_count + config.mtp_layers
    attention = 12.0 * layers * config.attention.heads * config.attention.head_dim * seq
    return (4.0 if frozen else 6.0) * weights + attention


def _of_two_stacks(config: ModelConfig, seq: int, decoder_seq: int) -> float:
    work, width = 0.0, config.attention.heads * config.attention.head_dim
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        looked_up = name == "positions.weight" or (name == "embed.weight" and not config.tie_embeddings)
        if len(shape) == 2 and not looked_up:
            of_source = name.startswith("encoder.") or name.endswith((".cross.k.weight", ".cross.v.weight"))
            work += 6.0 * shape[0] * shape[1] * (seq if of_source else decoder_seq)
    pairs = config.encoder.layers * seq * seq + config.layer_count * decoder_seq * (decoder_seq + seq)
    return (work + 12.0 * width * pairs) / seq


@dataclass
class Meter:
    """Turns steps into the figures of a log line."""

    flops: float
    """Per token."""
    devices: int
    """Or processes, on CPUs."""
    peak_tflops: float | None
    total_samples: int
    tokens: int = 0
    steps: int = 0
    samples: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, samples: int, tokens: int) -> None:
        """A step is done. tokens: all of its sequences', whether they count in the loss or not."""
        self.steps, self.samples, self.tokens = self.steps + 1, self.samples + samples, self.tokens + tokens

    def restart(self) -> None:
        """Leave out what isn't training: a save, an evaluation."""
        self.started, self.tokens, self.steps, self.samples = time.perf_counter(), 0, 0, 0

    def read(self, consumed: int) -> dict[str, float | None]:
        """Figures since the last restart, and restarts."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        per_device = self.tokens / seconds / self.devices
        tflops = per_device * self.flops / 1e12
        left = (self.total_samples - consumed) / max(self.samples, 1) * seconds
        figures = {
            "step_seconds": seconds / max(self.steps, 1),
            "tokens_per_second": per_device,
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "seconds_left": left,
        }
        self.restart()
        return figures


def peak_tflops(device_name: str | None) -> float | None:
    """None where the device is a CPU, or not known."""
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in (device_name or "")), None)


def line(figures: Mapping[str, Any], total: int | None) -> str:
    """For people."""
    step = f"step {figures['iteration']:>6}" + (f"/{total}" if total else "")
    mfu = f" ({figures['mfu']:.1%} MFU)" if figures["mfu"] else ""
    extra = f" | loss scale {figures['loss_scale']:g}" if figures.get("loss_scale", 1.0) != 1.0 else ""
    return (
        f"{step} | samples {figures['consumed_samples']} | loss {figures['loss']:.5f}{further(figures.get('others', {}))} | "
        f"lr {figures['learning_rate']:.3e} | grad norm {figures['grad_norm']:.3f}{extra} | {figures['step_seconds'] * 1e3:.0f} ms | "
        f"{figures['tokens_per_second']:,.0f} tokens/s/{figures['device']} | {figures['tflops']:.2f} TFLOP/s{mfu} | "
        f"{figures['memory_bytes'] / 2**30:.2f} GiB | {duration(figures['seconds_left'])} left"
        + (f" | {figures['skipped']} skipped" if figures.get("skipped") else "")
        + (f" | {figures['empty']} without labels" if figures.get("empty") else "")
    )


def further(others: Mapping[str, float]) -> str:
    """What is told of a step beside its loss."""
    return rewards(others) or "".join(f" | {name.replace('_', ' ')} {value:.5f}" for name, value in others.items())


def rewards(figures: Mapping[str, Any]) -> str:
    """Of pairs of answers; empty for any other run."""
    if "reward_accuracy" not in figures:
        return ""
    chosen, rejected, margin, accuracy = (figures[name] for name in FIGURES)
    return f" | rewards {chosen:.4f} chosen, {rejected:.4f} rejected, margin {margin:.4f}, accuracy {accuracy:.1%}"


def duration(seconds: float) -> str:
    """`1:02:03`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


METRICS = (
    "iteration", "consumed_samples", "loss", "grad_norm", "learning_rate", "tokens_per_second", "tflops", "mfu", "memory_bytes",
)  # fmt: skip
"""Keys of a line of the metrics file; floats are unrounded."""


class Sink(Protocol):
    """Where figures go."""

    def write(self, step: int, figures: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """One JSON object per logged step, appended, so that a run that was continued goes on in the same file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(dict(figures)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Raises UsageError where it isn't installed."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("--tensorboard-dir needs the package tensorboard: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(directory)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            if name != "iteration" and value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Raises UsageError where it isn't installed."""

    def __init__(self, project: str, name: str | None, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError("--wandb-project needs the package wandb: pip install wandb") from error
        self._run: Any = wandb.init(project=project, name=name, config=dict(settings))

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in figures.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sinks(logging: Logging, settings: Mapping[str, Any]) -> list[Sink]:
    """On the rank that logs. Raises UsageError for a package that is missing or a file that can't be written."""
    sinks: list[Sink] = []
    try:
        if logging.metrics_file:
            sinks.append(MetricsFile(Path(logging.metrics_file)))
        if logging.tensorboard_dir:
            sinks.append(TensorBoard(logging.tensorboard_dir))
        if logging.wandb_project:
            sinks.append(WeightsAndBiases(logging.wandb_project, logging.wandb_exp_name, settings))
    except OSError as error:
        raise UsageError(f"{error.filename}: can't be written: {error.strerror}") from error
    return sinks
