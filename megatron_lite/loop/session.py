"""One process's run from its start to its end, and what becomes of an error."""

from megatron_lite.loop import launch
from megatron_lite.loop.failure import report
from megatron_lite.loop.launch import Place
from megatron_lite.loop.prepare import prepare
from megatron_lite.loop.train import train
from megatron_lite.settings.config import Settings


def run(settings: Settings, *, finetune: bool) -> None:
    """Returns after a run that went well; ends the process otherwise."""
    place: Place | None = None
    try:
        place = launch.start(settings.parallel, deterministic=settings.training.deterministic_mode, steps=True)
        train(prepare(settings, place, finetune=finetune))
        launch.end(place)
    except KeyboardInterrupt:
        launch.leave(130)
    except Exception as error:
        launch.leave(report(error, _where(settings, place), place.store if place else None))


def _where(settings: Settings, place: Place | None) -> str:
    """`rank 3 (tp 1 pp 1 dp 0)`, for as far as it is known."""
    if place is None or place.world == 1:
        return f"rank {launch.rank()}"
    tp, pp = settings.parallel.tensor_model_parallel_size, settings.parallel.pipeline_model_parallel_size
    cp = settings.parallel.context_parallel_size
    dp = max(1, place.world // (tp * cp * pp))
    context = f" cp {place.rank // tp % cp}" if cp > 1 else ""
    at = f"tp {place.rank % tp} pp {place.rank // (tp * cp * dp)} dp {place.rank // (tp * cp) % dp}"
    return f"rank {place.rank} ({at}{context})"
