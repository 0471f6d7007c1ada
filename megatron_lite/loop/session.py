"""One process's run from its start to its end, including errors."""

from megatron_lite.loop import run_directory
from megatron_lite.loop.format_change import (
    changes_format,
    save_in_format,
    with_changed_format,
)
from megatron_lite.loop.prepare import prepare
from megatron_lite.loop.stop import INTERRUPTED_STATUS
from megatron_lite.loop.train import train
from megatron_lite.processes import launch
from megatron_lite.processes.failure import report, report_interrupt
from megatron_lite.processes.launch import Place
from megatron_lite.settings.config import Settings


def run(settings: Settings, *, finetune: bool) -> None:
    """Run. It returns after success; on an error it ends the process."""
    place: Place | None = None
    try:
        settings = with_changed_format(settings)
        place = launch.start(
            settings.parallel, deterministic=settings.training.deterministic_mode, steps=True
        )
        with run_directory.held(settings, place):
            prepared = prepare(settings, place, finetune=finetune)
            if changes_format(settings):
                save_in_format(prepared)
            else:
                train(prepared)
        launch.end(place)
    except KeyboardInterrupt:  # loop/stop.py handles Ctrl-C in later phases
        report_interrupt()
        launch.leave(INTERRUPTED_STATUS)
    except Exception as error:
        launch.leave(report(error, _where(settings, place), place.store if place else None))


def _where(settings: Settings, place: Place | None) -> str:
    """Return the known part of `rank 3 (tp 1 pp 1 dp 0)`."""
    if place is None or place.world == 1:
        return f"rank {launch.rank()}"
    rank = place.rank
    tp = settings.parallel.tensor_model_parallel_size
    pp = settings.parallel.pipeline_model_parallel_size
    cp = settings.parallel.context_parallel_size
    dp = max(1, place.world // (tp * cp * pp))
    tp_rank = rank % tp
    cp_rank = rank // tp % cp
    dp_rank = rank // (tp * cp) % dp
    pp_rank = rank // (tp * cp * dp)
    context = f" cp {cp_rank}" if cp > 1 else ""
    return f"rank {rank} (tp {tp_rank} pp {pp_rank} dp {dp_rank}{context})"
