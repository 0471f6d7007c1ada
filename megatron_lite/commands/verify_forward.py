"""`megaconv verify --forward`, which finds this function by an entry point of pyproject.toml. Without torch until it is called."""

from megaconv.commands.forward_pass import ForwardPass, ForwardRequest, Report
from megaconv.extras import require_torch


def verify_forward(request: ForwardRequest, report: Report) -> ForwardPass:
    """Compute one or two models. Raises UsageError without torch."""
    require_torch("megaconv verify --forward", "train,data")
    from megatron_lite.forward.verification import verify

    return verify(request, report)
