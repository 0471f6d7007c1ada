"""Refusals before anything is planned: options that the saver doesn't use, and sources that it can't hold."""

from megaconv.errors import NotExpressible, UnknownFamily, UnsupportedInput, UsageError
from megaconv.families.parts.llama_vision import LEFT_OUT
from megaconv.families.parts.whole_model import named
from megaconv.input import Input
from megaconv.model.ir import Header
from megaconv.options import LOSSES, ConvertOptions, SaveOptions, refuse_unused
from megaconv.saver import Saver


def refuse_options(saver: Saver, save: SaveOptions) -> None:
    """Raises UsageError for unknown losses, and for options that the saver doesn't use."""
    for word in save.allow_lossy:
        if word not in LOSSES:
            raise UsageError(
                f"--allow-lossy {word!r} is not known; losses that can be allowed are {', '.join(LOSSES)}"
            )
    if saver.uses is not None:
        refuse_unused(saver.name, saver.uses(save), save)


def refuse_source(header: Header, found: Input, saver: Saver, options: ConvertOptions) -> None:
    """Raises NotExpressible or UsageError for a source that the saver or an option doesn't fit."""
    if header.adapter is not None:
        _refuse_as_adapter(found, saver, options)
    _refuse_whole(header, saver, options)
    _refuse_scores(header, found, saver)
    _refuse_own_names(header, options)
    if options.adapters and LEFT_OUT in header.beside:
        raise UsageError(
            f"--adapter: --text-only numbers the layers of {found.given} anew, and an adapter has the original numbers; merge it first "
            "with megaconv merge MODEL ADAPTER --save-dir OUT, and convert the result"
        )
    if header.carries_optimizer:
        return
    if options.optimizer:
        raise UsageError(
            f"--optimizer: {found.given} holds no optimizer state; leave it out to convert the weights alone",
            code="no-optimizer",
        )
    if options.save.distributed_optimizer is not None:
        raise UsageError(
            "--use-distributed-optimizer: has no effect, because no optimizer state is converted; leave it out",
            code="no-optimizer",
        )


def _refuse_as_adapter(found: Input, saver: Saver, options: ConvertOptions) -> None:
    """Raises NotExpressible if the saver writes only whole models, UsageError for options that need a whole model."""
    if not saver.holds_adapter:
        raise NotExpressible(
            f"{found.given}: is an adapter, and --saver {saver.name} writes whole models; --saver peft and --saver core --ckpt-format "
            "torch_dist translate it, and megaconv merge BASE ADAPTER merges one of peft's into its base"
        )
    if options.adapters:
        raise UsageError(
            f"--adapter: {found.given} is an adapter itself; give the base it is to be merged into as --load-dir"
        )


def _refuse_whole(header: Header, saver: Saver, options: ConvertOptions) -> None:
    """Raises UsageError for a whole multimodal model if the saver or an option needs its language model alone."""
    whole = header.config.whole
    if whole is None:
        return
    name = named(whole.config)
    alone = "; --text-only converts the language model in it"
    if not saver.holds_whole:
        first = "; convert it with --saver hf first" if saver.keeps_names else ""
        raise UsageError(
            f"--saver {saver.name}: can't store the multimodal model {name}{first}{alone}"
        )
    if options.save.base is not None:
        raise UsageError(f"--base: the source holds all of {name}; leave it out")
    if options.save.quantize:
        raise UsageError(f"--quantize: is not supported for the multimodal model {name}{alone}")
    if options.adapters:
        raise UsageError(
            f"--adapter: is merged into the multimodal model {name} only from hf to hf or dcp; convert to hf first, merge there "
            "with megaconv merge MODEL ADAPTER --save-dir OUT, and convert the result"
        )


def _refuse_scores(header: Header, found: Input, saver: Saver) -> None:
    """Raises NotExpressible for a reward model or critic if the saver writes language models alone."""
    if header.config.has("scores") and not saver.holds_scores:
        raise NotExpressible(
            f"{found.given}: its head gives scores, as in a reward model or a critic, which --saver {saver.name} doesn't write; "
            "choose --saver hf, core, dcp or deepspeed"
        )


def _refuse_own_names(header: Header, options: ConvertOptions) -> None:
    """Raises UnknownFamily for options that change tensors by their meaning, if nothing is known of them."""
    unknown = header.config.own_names
    if unknown is None:
        return
    meaning = {"--quantize": options.save.quantize, "--base": options.save.base}
    for option, value in meaning.items():
        if value:
            raise UnknownFamily(f"{option}: needs a supported model; {unknown.reason}")
    values = {"--dtype": bool(options.dtype), "--adapter": bool(options.adapters)}
    for option, is_given in values.items():
        if is_given and unknown.stays_quantized:
            raise UnsupportedInput(f"{option}: needs plain weights; {unknown.reason}")
