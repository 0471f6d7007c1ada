"""The reference's log-probabilities on disk, so that a continued run or another run on the same pairs can reuse them.

DIRECTORY/dpo-reference-training.npz        `values` float64 [pairs, 2], NaN for pairs that weren't drawn; `made_of`, JSON: see MadeOf
DIRECTORY/kto-reference-training.npz        the same of rated answers, each with the answer to another question
"""

import json
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import megaconv
from formats.errors import CheckpointError
from formats.file_limit import is_limit, limit_reached
from formats.whole_file import whole_file
from megatron_lite.data.finetuning.pair_dataset import PairDataset
from megatron_lite.data.index_cache import cache_key
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import Sizes

MadeOf = dict[str, str]
"""The inputs of the values, named for people -> their fingerprints."""
Values = NDArray[np.float64]


def weights_of(place: str) -> str:
    """Return the fingerprint of the reference's weights. It reads all weights. Raises CheckpointError."""
    return megaconv.fingerprint(place, optimizer=False).weights


def encoder_of(directory: Path, weights: str) -> str:
    """Return the fingerprint of an encoder of images, with its image processor. weights: of its model, as `weights_of`."""
    settings = {path.name: path.read_text() for path in sorted(directory.glob("*config.json"))}
    libraries = {name: _version(name) for name in ("transformers", "pillow", "torchvision")}
    return cache_key(weights=weights, settings=settings, libraries=libraries)


def _version(name: str) -> str | None:
    """Return the version of a package; None if it isn't installed. transformers scales images by torchvision if it is there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def made_of(
    weights: str,
    encoder: str | None,
    dataset: PairDataset,
    sizes: Sizes,
    options: ModelOptions,
    device: torch.device,
) -> MadeOf:
    """Return the fingerprints of all inputs. encoder: of the encoder of images; None if no data has images.

    Layout and batch are among them: another order of sums changes the last bits, and losses have to be equal bit by
    bit.
    """
    pieces = dataset.pieces
    computed = (sizes.layout, sizes.dp, sizes.cp, sizes.micro_batch, sizes.batch.full, options.fp8)
    data = {
        "tokens": pieces.examples.tokens,
        "learned": pieces.examples.learned,
        "starts": pieces.starts,
        "ends": pieces.ends,
    }
    how = (
        dataset.seq_length,
        options.dtype,
        options.sequence_parallel,
        options.context,
        device.type,
        torch.__version__,
    )
    images = {}
    if encoder is not None and dataset.images is not None and dataset.images.placed:
        images["images or their encoder"] = cache_key(images=dataset.images.identity, by=encoder)
    return images | {
        "weights of --load": weights,
        "data, tokenizer or chat template": cache_key(**data),
        "layout, batch, precision or version of torch": cache_key(
            computed=repr(computed), how=list(how)
        ),
    }


def path_of(directory: str, objective: str, which: str) -> Path:
    """Return the path of a dataset's file. objective: `dpo` or `kto`. which: `training`, `validation` or `test`."""
    return Path(directory) / f"{objective}-reference-{which}.npz"


def read(path: Path, wanted: MadeOf, pairs: NDArray[np.int64]) -> tuple[Values | None, str | None]:
    """Return (values of at least these pairs, None), or (None, reason to compute them; None if there is no file)."""
    if not path.exists():
        return None, None
    try:
        with np.load(path, allow_pickle=False) as file:
            values, found = np.array(file["values"]), json.loads(str(file["made_of"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if is_limit(error):
            raise limit_reached(path) from error
        return None, f"is damaged ({error})"
    others = [
        name
        for name, value in wanted.items()
        if not isinstance(found, dict) or found.get(name) != value
    ]
    if others:
        return None, f"was made with other {' and '.join(others)}"
    if values.dtype != np.float64 or values.ndim != 2 or not np.isfinite(values[pairs]).all():
        return None, "lacks some of the pairs"
    return values, None


def write(path: Path, made_of: MadeOf, values: Values) -> None:
    """Write the file, which appears by one rename. Raises CheckpointError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.savez(file, values=values, made_of=np.array(json.dumps(made_of)))
    except OSError as error:
        raise CheckpointError(
            f"{path}: can't be written: {error.strerror}; give a directory of the reference's cache where there is space and permission"
        ) from error
