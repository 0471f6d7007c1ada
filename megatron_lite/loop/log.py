"""The output of a run: a line per logged step, and the same figures as JSON lines, TensorBoard events or a W&B run.

MFU follows the published definition: a token costs 6 N + 12 L h s operations. N is the number of weights in products,
without lookup tables; L layers; h = heads x head size; s tokens of a sequence. Attention is not halved for its mask,
and recomputation doesn't count. Each mixer declares its operations besides products with weights: for attention 12 h s.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.json_text import json_text
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.predicting import kind_of_layer, predicting_kinds
from megaconv.model.table import canonical_shapes
from megaconv.planning.mixers import in_layer
from megatron_lite.models.mixers.table import mixer_of
from megatron_lite.settings.config import Logging


def flops_per_token(
    config: ModelConfig,
    seq: int,
    decoder_seq: int = 0,
    *,
    frozen: bool = False,
    trains_head: bool = False,
    trains_mtp: bool = True,
) -> float:
    """Return the operations per token, forward and backward.

    frozen: weights have no gradients (4 N instead of 6 N); adapters are not counted. trains_head: except the head.
    trains_mtp: False if MTP layers are not computed.
    decoder_seq: for T5. Each token of the encoder then includes the decoder's share.
    """
    if not trains_mtp:
        config = changed(config, {"mtp_layers": 0})
    if config.encoder.layers:
        return _of_two_stacks(config, seq, decoder_seq)
    if config.has("retriever"):
        return _of_towers(config, seq)
    # A lookup is no product. A tied embedding counts as the head. One token of a sequence has a score.
    looked_up = {
        "positions.weight",
        "token_types.weight",
        "layer_inputs.embed.weight",
        "score.weight",
    }
    head = "embed.weight" if config.tie_embeddings else "head.weight"
    if not config.tie_embeddings:
        looked_up.add("embed.weight")
    share_of_experts = config.experts.per_token / max(config.experts.count, 1)
    weights = 0.0
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        if len(shape) != 2 or name in looked_up:
            continue
        times = 1.0
        if ".mlp.experts." in name:
            times = share_of_experts
        elif name == head:
            # Each further predicted token uses the head once more.
            times += config.mtp_layers
            times *= 1.5 if frozen and trains_head else 1.0
        weights += shape[0] * shape[1] * times
    further = config.mtp_layers * len(predicting_kinds(config))
    kinds = [kind_of_layer(config, layer) for layer in range(config.layer_count + further)]
    mixed = 0.0
    for kind in kinds:
        mixer = mixer_of(config, kind)
        mixed += 0.0 if mixer is None else mixer.cost.operations(in_layer(config, kind), seq)
    return (4.0 if frozen else 6.0) * weights + mixed


def _of_towers(config: ModelConfig, seq: int) -> float:
    """Return the operations per token of a query, with the operations for its context, which is as long.

    The second of two passes is counted alone, as with activation recomputation.
    """
    weights = 0.0
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        is_of_layer = ".layers." in name
        if len(shape) == 2 and is_of_layer:
            weights += shape[0] * shape[1]
    towers_of_weights = 1 if config.has("separate_towers") else 2
    width = config.attention.heads * config.attention.head_dim
    mixed = 2 * 12.0 * width * config.layer_count * seq
    return 6.0 * weights * towers_of_weights + mixed


def _of_two_stacks(config: ModelConfig, seq: int, decoder_seq: int) -> float:
    work, width = 0.0, config.attention.heads * config.attention.head_dim
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        looked_up = name == "positions.weight" or (
            name == "embed.weight" and not config.tie_embeddings
        )
        if len(shape) == 2 and not looked_up:
            of_source = name.startswith("encoder.") or name.endswith(
                (".cross.k.weight", ".cross.v.weight")
            )
            work += 6.0 * shape[0] * shape[1] * (seq if of_source else decoder_seq)
    pairs = config.encoder.layers * seq * seq + config.layer_count * decoder_seq * (
        decoder_seq + seq
    )
    return (work + 12.0 * width * pairs) / seq


@dataclass
class Meter:
    """Computes the figures of a log line from the steps."""

    flops: float
    """Operations per token."""
    devices: int
    """Number of GPUs, or of processes on CPUs."""
    peak_tflops: float | None
    total_samples: int
    tokens: int = 0
    steps: int = 0
    samples: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, samples: int, tokens: int) -> None:
        """Count a step. tokens: of all its sequences, whether or not they count in the loss."""
        self.steps += 1
        self.samples += samples
        self.tokens += tokens

    def restart(self) -> None:
        """Restart the measurement, to exclude time that is not training: a save, an evaluation."""
        self.started, self.tokens, self.steps, self.samples = time.perf_counter(), 0, 0, 0

    def read(self, consumed: int) -> dict[str, float | None]:
        """Return the figures since the last restart, and restart."""
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


def line(figures: Mapping[str, Any], further: str, total: int | None) -> str:
    """Return the log line. further: the part after the loss, from Objective.shown."""
    of_total = f"/{total}" if total else ""
    scale = figures["loss_scale"]
    mfu = figures["mfu"]
    skipped = figures["skipped"]
    empty = figures["empty"]
    milliseconds = figures["step_seconds"] * 1e3
    memory_gib = figures["memory_bytes"] / 2**30
    tokens = figures["tokens_per_second"]
    speed = f"{figures['tflops']:.2f} TFLOP/s"
    parts = [
        f"step {figures['iteration']:>6}{of_total}",
        f"samples {figures['consumed_samples']}",
        f"loss {figures['loss']:.5f}{further}",
        f"lr {figures['learning_rate']:.3e}",
        f"grad norm {figures['grad_norm']:.3f}",
        f"loss scale {scale:g}" if scale != 1.0 else "",
        f"{milliseconds:.0f} ms",
        f"{tokens:,.0f} tokens/s/{figures['device']}",
        f"{speed} ({mfu:.1%} MFU)" if mfu else speed,
        f"{memory_gib:.2f} GiB",
        f"{duration(figures['seconds_left'])} left",
        f"{skipped} skipped" if skipped else "",
        f"{empty} without labels" if empty else "",
    ]
    return " | ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Format seconds as `1:02:03`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


METRICS = (
    "iteration", "consumed_samples", "loss", "grad_norm", "learning_rate", "tokens_per_second", "tflops", "mfu", "memory_bytes",
)  # fmt: skip
"""Keys of a line in the metrics file; floats are not rounded."""


class Sink(Protocol):
    """A destination of figures."""

    def write(self, step: int, figures: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """One JSON object per logged step, appended, so that a continued run writes to the same file. A loss that is NaN is null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._file.write(json_text(figures) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard events. Raises UsageError if tensorboard is not installed."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "--tensorboard-dir needs the package tensorboard: pip install tensorboard"
            ) from error
        self._writer: Any = SummaryWriter(directory)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            if name != "iteration" and value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run. Raises UsageError if wandb is not installed."""

    def __init__(self, project: str, name: str | None, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                "--wandb-project needs the package wandb: pip install wandb"
            ) from error
        self._run: Any = wandb.init(project=project, name=name, config=dict(settings))

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._run.log(
            {name: value for name, value in figures.items() if value is not None}, step=step
        )

    def close(self) -> None:
        self._run.finish()


def open_sinks(logging: Logging, settings: Mapping[str, Any]) -> list[Sink]:
    """Open the sinks on the rank that logs. Raises UsageError for a missing package or a file that can't be written."""
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
