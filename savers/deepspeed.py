"""DeepSpeed's universal checkpoints, from which a run continues under ZeRO 1, 2 or 3 on any number of ranks.

Names are those of transformers' modules. A source without optimizer state becomes the weights of a module.
"""

from formats.output import FileLayout, PlainFile
from megaconv.engine.plan import OutputPlan
from megaconv.engine.sidecars import small_files
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.ir import Header
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.natives import unsharded_tensors
from megaconv.options import SaveOptions
from megaconv.pytorch import groups
from megaconv.pytorch.stacked_experts import require_stackable
from megaconv.pytorch.universal_output import UniversalOutput
from megaconv.saver import Saver

_EXPERTS = {"stacked": HF_STACKED, "separate": HF}
_ADAMS = ("torch", "deepspeed")


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ()


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises NotExpressible if the family has no config.json for this model."""
    config, table = header.config, family(header.config.family)
    experts = options.extra.get("experts", "stacked")
    adam = options.extra.get("adam", "torch")
    for option, value, known in (("experts", experts, _EXPERTS), ("adam", adam, _ADAMS)):
        if value not in known:
            raise UsageError(
                f"--option {option}={value}: is not known; choose {' or '.join(known)}"
            )
    if experts == "stacked":
        require_stackable(config, "--option experts=separate keeps them")
    natives = {
        native.name: native
        for native in unsharded_tensors(table.rows, config, _EXPERTS[experts])
        if native.copy is None
    }
    config_json = table.config_json(config, header.training.arguments)
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(config_json)}
    files |= small_files(header)
    output = UniversalOutput(header, natives, steps_are_numbers=adam == "deepspeed")
    notices = output.plan()
    return OutputPlan(files | output.files, output.placements, output.zeros, notices=notices)


SAVER = Saver(
    name="deepspeed",
    description="DeepSpeed universal checkpoint with transformers' names, for ZeRO 1, 2 and 3; without optimizer state, a module's weights",
    plan=plan,
    holds_scores=True,
    options={
        "experts": "the names of experts: `stacked`, one tensor for all experts of a layer, as in modules of transformers 5 (the default), "
        "or `separate`",
        "adam": "the optimizer that continues: `torch`, which counts steps in tensors (the default), or `deepspeed` (FusedAdam and "
        "DeepSpeedCPUAdam), which counts in numbers",
    },
    uses=uses,
    holds_optimizer=True,
    unfit=groups.unfit,
)
