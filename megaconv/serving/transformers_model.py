"""A checkpoint of any format as a model of transformers, without a converted copy on disk.

transformers 5 reads a tensor when it needs it, as `tensor[...]`. So it gets tensors that are not read yet, and memory
holds the model once.
"""

import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megaconv.errors import NotExpressible
from megaconv.extras import require_transformers
from megaconv.families.parts.code_keys import without_code
from megaconv.options import ConvertOptions
from megaconv.serving.repository import Revision, open_revision
from megaconv.serving.state_dict import state_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GENERATION = "generation_config.json"
_WEIGHTS = ".safetensors"
_log = logging.getLogger("megaconv")


def load_transformers(
    path: str | Path, options: ConvertOptions, device_map: Any = None
) -> "PreTrainedModel":
    """The model, in evaluation mode and in the checkpoint's dtype.

    device_map: as `from_pretrained` of transformers takes it; anything but None needs the package accelerate.
    Raises UsageError without torch or transformers 5, and NotExpressible if transformers has no class for the model or
    its class has other tensors.
    """
    require_transformers("megaconv.load_transformers")
    revision = open_revision(str(path), options)
    with TemporaryDirectory() as directory:
        _write_small_files(revision, Path(directory))
        return _load(revision, directory, device_map)


def _write_small_files(revision: Revision, directory: Path) -> None:
    """Write the configuration files of a model, without keys that name code. Tokenizers are left out."""
    for name, file in revision.files.items():
        if "/" not in name and name.endswith("config.json"):
            raw = json.loads(file.read(0, file.size))
            (directory / name).write_text(json.dumps(without_code(raw)), encoding="utf-8")


def _load(revision: Revision, directory: str, device_map: Any) -> "PreTrainedModel":
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    (name,) = config.architectures or ("AutoModelForCausalLM",)
    kind = getattr(transformers, name, None)
    if kind is None:
        raise NotExpressible(
            f"transformers {transformers.__version__} has no class {name}; serve the checkpoint with `megaconv serve-hf` instead"
        )
    state = state_dict(revision.header, dict(revision.source.tensors()), "hf")
    placed = {} if device_map is None else {"device_map": device_map}
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(state.slices),
        dtype=getattr(torch, revision.header.config.dtype),
        output_loading_info=True,
        **placed,
    )
    _require_all_tensors(report, name)
    if (Path(directory) / _GENERATION).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _require_all_tensors(report: Any, name: str) -> None:
    """Raises NotExpressible if the class has other tensors than the checkpoint. transformers only warns."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(map(str, report[kind]))
        if found:
            raise NotExpressible(
                f"{name} of transformers: {len(found)} {kind.replace('_keys', '')} tensors, such as {found[0]}"
            )
