"""The loss curve as a PNG."""

from collections.abc import Sequence
from pathlib import Path

from megaconv.errors import UsageError


def check_installed() -> None:
    """Check for matplotlib before the run, not after it. Raises UsageError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs the package matplotlib: pip install matplotlib") from error


def draw(
    path: Path, train: Sequence[tuple[int, float]], valid: Sequence[tuple[int, float]]
) -> None:
    """Write the plot to `path`. train, valid: (step, loss) pairs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), label="training", linewidth=1.2)
    if valid:
        axes.plot(*zip(*valid, strict=True), label="validation", marker="o", markersize=3)
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
