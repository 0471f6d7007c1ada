"""The plan of a DeepSpeed checkpoint: a universal one if there is optimizer state, else the module's weights alone.

    latest_universal                                    the name of the directory: global_step3_universal
    global_step3_universal/
        mp_rank_00_model_states.pt                      the module and the run's progress, for ZeRO 1 and 2
        zero_pp_rank_0_mp_rank_00_model_states.pt       the progress alone, for ZeRO 3
        zero/optimizer_state.pt                         the parameter groups
        zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     {"param": the whole tensor}
        zero/<parameter>/step.pt                        the number of updates

ZeRO 3 gives the settings of the first group to all groups, so it gets only the settings that all groups share. Source:
deepspeed 0.19.8, checkpoint/universal_checkpoint.py, runtime/base_optimizer.py and runtime/zero/stage3.py.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from formats import torch_zip
from formats.output import FileLayout, PlainFile
from formats.pickle_writer import Constant, Placeholder
from formats.tensor import Shape
from formats.torch_zip import TorchZipLayout
from formats.zero_partitions import LATEST
from formats.zero_universal import FILES, FOLDER, GROUPS
from formats.zero_universal import LATEST as LATEST_UNIVERSAL
from megaconv.engine.plan import Placement, Zeros, add_placements, native_dtype, padding_of
from megaconv.errors import NotExpressible
from megaconv.model.ir import WEIGHT, Header, Key
from megaconv.model.natives import NativeTensor
from megaconv.model.training import OptimizerState, TorchGroups
from megaconv.pytorch import progress
from megaconv.pytorch.groups import IMPLEMENTATION, WITHOUT, group_of, listed, torch_groups
from megaconv.pytorch.megatron_entry import ENTRY, entry

MODEL_FILE = "mp_rank_00_model_states"
ZERO_3_FILE = "zero_pp_rank_0_mp_rank_00_model_states"
VERSION = "0.19.8"
"""The release of DeepSpeed whose files these are."""
_RECORD = "param"


@dataclass(frozen=True)
class UniversalOutput:
    """The files of one output, with the place of every tensor."""

    header: Header
    natives: Mapping[str, NativeTensor]
    """The module's tensors by name."""
    steps_are_numbers: bool = False
    """True for DeepSpeed's own Adam, which counts steps in numbers. torch's counts them in tensors."""
    files: dict[str, FileLayout] = field(default_factory=dict)
    placements: dict[Key, list[Placement]] = field(default_factory=dict)
    zeros: list[Zeros] = field(default_factory=list)
    _layouts: dict[tuple[str, Shape], TorchZipLayout] = field(default_factory=dict)
    """Plans of the files that are laid out alike."""

    def plan(self) -> tuple[str, ...]:
        """Plan everything. Returns the notices for the user. Raises NotExpressible."""
        state = self.header.training.optimizer
        if state is None or not self.header.carries_optimizer:
            directory = f"global_step{progress.iteration_of(self.header.training)}"
            self.files[LATEST] = PlainFile(directory.encode())
            self._add_module(directory, [], TorchGroups((), {}))
            return ()
        return self._plan_universal(state)

    def _plan_universal(self, state: OptimizerState) -> tuple[str, ...]:
        groups = torch_groups(self.header)
        directory = f"global_step{progress.iteration_of(self.header.training)}_universal"
        self.files[LATEST_UNIVERSAL] = PlainFile(directory.encode())
        shapes: list[dict[str, Shape]] = [{} for _ in groups.groups]
        for name, native in self.natives.items():
            index = group_of(native, groups, self.header)
            if index is not None:
                shapes[index][name] = native.shape
                self._add_parameter(f"{directory}/{FOLDER}/{name}", name, native, state)
        self._add_groups(f"{directory}/{FOLDER}/{GROUPS}", groups, state)
        self._add_module(directory, shapes, groups)
        counts = Counter({index: len(names) for index, names in enumerate(shapes)})
        notices = [progress.left_out(self.header.training)]
        if len(shapes) > 1:
            notices.append(
                f"give the run these parameter groups, in this order: {listed(groups.groups, counts)}"
            )
        return tuple(notices)

    def _add_parameter(
        self, folder: str, name: str, native: NativeTensor, state: OptimizerState
    ) -> None:
        if "/" in name or name in (".", ".."):
            raise NotExpressible(f"{name!r}: is no name of a directory in {FOLDER}/; {WITHOUT}")
        first_part = next(iter(native.parts))
        for slot, file in FILES.items():
            has_slot = Key(first_part, slot) in self.header.manifest
            held = slot if has_slot else WEIGHT
            if native_dtype(self.header, native, held) != "float32":
                raise NotExpressible(f"{name}: has no {slot} in fp32, which DeepSpeed trains")
            path = f"{folder}/{file}"
            root = file.removesuffix(".pt")
            self.files[path] = self._tensor_file(root, native.shape)
            self._place(native, path, _RECORD, held)
        self.files[f"{folder}/step.pt"] = torch_zip.plan(self._step(state), "step")

    def _place(self, native: NativeTensor, file: str, record: str, slot: str = WEIGHT) -> None:
        add_placements(self.placements, self.header, native, file, record, slot)
        self.zeros.extend(padding_of(self.header, native, file, record, slot))

    def _tensor_file(self, root: str, shape: Shape) -> TorchZipLayout:
        if (root, shape) not in self._layouts:
            held = {"param": Placeholder(_RECORD, shape, "float32")}
            self._layouts[root, shape] = torch_zip.plan(held, root)
        return self._layouts[root, shape]

    def _step(self, state: OptimizerState) -> int | Constant:
        steps = state.step or 0
        if self.steps_are_numbers:
            return steps
        return Constant((), "float32", struct.pack("<f", steps))

    def _add_groups(self, path: str, groups: TorchGroups, state: OptimizerState) -> None:
        settings = [_settings(group) for group in groups.groups]
        listed_groups = [each | {"params": [index]} for index, each in enumerate(settings)]
        shared = dict(settings[0])
        for each in settings[1:]:
            shared = {name: value for name, value in shared.items() if each.get(name) == value}
        for_zero_3 = {"state": {0: {"step": self._step(state)}}, "param_groups": [shared]}
        value = {
            "ds_version": VERSION,
            "param_groups": listed_groups,
            "optimizer_state_dict": for_zero_3,
        }
        self.files[path] = torch_zip.plan(value, GROUPS.removesuffix(".pt"))

    def _add_module(
        self, directory: str, shapes: list[dict[str, Shape]], groups: TorchGroups
    ) -> None:
        module: dict[str, Placeholder] = {}
        path = f"{directory}/{MODEL_FILE}.pt"
        for name, native in self.natives.items():
            module[name] = Placeholder(name, native.shape, native_dtype(self.header, native))
            self._place(native, path, name)
        run = self._progress(shapes, groups)
        self.files[path] = torch_zip.plan({"module": module, **run}, MODEL_FILE)
        if shapes:
            zero_3 = f"{directory}/{ZERO_3_FILE}.pt"
            self.files[zero_3] = torch_zip.plan({"module": {}, **run}, ZERO_3_FILE)

    def _progress(self, shapes: list[dict[str, Shape]], groups: TorchGroups) -> dict[str, Any]:
        """Everything in a model_states.pt but the module. shapes: of each group's parameters."""
        training = self.header.training
        steps = progress.iteration_of(training)
        # last_epoch and the like are torch's, last_batch_iteration is that of DeepSpeed's own schedulers.
        scheduler = progress.lr_scheduler(training, groups) | {"last_batch_iteration": steps - 1}
        scheduler.pop("base_lrs", None)  # the run has its own
        return {
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": scheduler,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": steps,
            "global_samples": training.consumed_train_samples,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": VERSION,
            ENTRY: entry(training),
        }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run takes over. It keeps its own choices of how a step is computed."""
    return {name: value for name, value in group.items() if name not in IMPLEMENTATION}
