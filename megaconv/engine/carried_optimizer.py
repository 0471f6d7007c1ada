"""Decides whether an output gets the optimizer state of its source, and the dtype that its weights then have."""

from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.model.ir import Header
from megaconv.options import ConvertOptions
from megaconv.saver import Saver
from megaconv.values.cast import dtype_name

_WITHOUT = "leave --optimizer out to convert the weights alone"


def reason_to_leave_out(header: Header, saver: Saver, options: ConvertOptions) -> str | None:
    """The reason why an output can't hold the optimizer state of a source, as a notice; None if it can or has none.

    Raises NotExpressible with the reason if the user insists on the state.
    """
    if not header.carries_optimizer:
        return None
    reason = saver.unfit(header) if saver.unfit is not None else None
    in_16_bits = options.dtype is not None and dtype_name(options.dtype) != "float32"
    if reason is None and saver.trains_weights and in_16_bits:
        reason = (
            f"PyTorch's optimizer trains fp32 weights, and --dtype {options.dtype} asks for others"
        )
    if reason is not None and options.optimizer:
        raise NotExpressible(
            f"--optimizer: --saver {saver.name} can't hold it: {reason}; {_WITHOUT}"
        )
    return reason


def with_trained_weights(header: Header, saver: Saver, options: ConvertOptions) -> ConvertOptions:
    """The options, with fp32 weights if the output's software trains the weights themselves."""
    if header.carries_optimizer and saver.trains_weights:
        return replace(options, dtype="float32")
    return options
