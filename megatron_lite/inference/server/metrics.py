"""The metrics of a server, in Prometheus' format."""

from collections.abc import Mapping

from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.slots import Drafter

_PREFIX = "megatron_lite_"


def metrics(worker: Worker, model: EngineModel, answered: Mapping[tuple[str, int], int]) -> str:
    """Return the text. answered: number of answers by route and status."""
    name = f"{_PREFIX}requests_total"
    lines = [f"# TYPE {name} counter"]
    for (route, status), count in sorted(answered.items()):
        lines.append(f'{name}{{route="{route}",status="{status}"}} {count}')
    for kind, values in (("counter", _counters(worker, model)), ("gauge", _gauges(worker, model))):
        for word, value in values.items():
            lines.append(f"# TYPE {_PREFIX}{word} {kind}")
            lines.append(f"{_PREFIX}{word} {value}")
    return "\n".join(lines) + "\n"


def _counters(worker: Worker, model: EngineModel) -> dict[str, int]:
    found = {
        "prompt_tokens_total": worker.prompt_tokens,
        "prompt_tokens_reused_total": worker.reused_tokens,
        "generated_tokens_total": worker.tokens,
        "requests_without_answer_total": worker.without_answer,
    }
    if isinstance(model, Drafter):
        found |= {
            "draft_steps_total": model.counts.steps,
            "draft_tokens_total": model.counts.drafted,
            "draft_tokens_accepted_total": model.counts.accepted,
        }
    return found


def _gauges(worker: Worker, model: EngineModel) -> dict[str, int]:
    running, waiting = worker.counts
    return {
        "requests_running": running,
        "requests_waiting": waiting,
        "slots": model.slots,
        "cache_bytes": model.cache.bytes(),
    }
