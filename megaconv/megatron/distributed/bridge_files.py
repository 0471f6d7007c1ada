"""Writes the files that Megatron-Bridge reads beside `torch_dist`: settings instead of args, counts, tokenizer.

    <root>/latest_train_state.pt                    which iteration is the last
    <root>/iter_0000001/run_config.yaml             `model:` what Bridge builds the model from, `checkpoint:` what was saved
    <root>/iter_0000001/train_state.pt              the counts of samples
    <root>/iter_0000001/tokenizer/                  what Bridge's load_tokenizer() opens, by the `tokenizer:` of run_config.yaml

run_config.py reads these files. Source: checkpointing.py, model_load_save.py and state.py of Megatron-Bridge 0.3.1 to 0.6.2.
"""

from argparse import Namespace
from typing import Any

from formats import rank_files, torch_zip
from formats.lazy_numpy import np
from formats.output import FileLayout, PlainFile
from formats.pickle_writer import Constant
from formats.yaml_file import yaml_bytes
from megaconv.engine.sidecars import small_files
from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.provider_fields import provider_fields
from megaconv.megatron.distributed.run_config import LATEST, RUN_CONFIG, TRAIN_STATE
from megaconv.model.ir import Header
from megaconv.model.layout import Layout
from megaconv.model.training import TrainingState

ADAPTER_KIND, FUSED = "lora", "fused"
"""An option and its value.

The value asks for one A per fused layer, as in Bridge's LoRA, even if A has to be assembled.
"""
CONTENT = {"singleton_local_shards": False}
"""content_metadata of common.pt. Bridge adds an entry to it before it reads any tensor."""
_TOKENIZER = "megatron.bridge.training.tokenizers.config.TokenizerConfig"
_EMPTY_PATH = "megatron.bridge.training.model_load_save.Path"
"""pathlib.Path, by the name with which load_tokenizer() compares a path with Path().

For an empty path Bridge opens the tokenizer beside the checkpoint. Since 0.4.1 it makes no object of `pathlib` itself.
"""


def bridge_files(
    header: Header,
    layout: Layout,
    args: Namespace,
    iteration: int | None,
    *,
    with_optimizer: bool,
    with_rng: bool,
) -> dict[str, FileLayout]:
    """The files by path below the root.

    Raises NotExpressible for a model that Bridge's general providers can't build, and for a release checkpoint.
    """
    if iteration is None:
        raise NotExpressible("--release: Megatron-Bridge saves iterations alone; leave it out")
    version = rank_files.iteration_directory(iteration)
    tokenizer = (
        small_files(header)
        if any(name.startswith("tokenizer") for name in (*header.files, *header.made))
        else {}
    )
    settings: dict[str, Any] = {
        "model": provider_fields(header.config, layout, args),
        "checkpoint": {
            "save_optim": with_optimizer,
            "save_rng": with_rng,
            "fully_parallel_save": True,
        },
        "peft": None,
    }
    if tokenizer:
        here = {"_target_": _EMPTY_PATH}
        settings["tokenizer"] = {
            "_target_": _TOKENIZER,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": here,
        }
    counts = torch_zip.plan(_counts(iteration, header.training), "train_state")
    return {
        LATEST: counts,
        f"{version}/{TRAIN_STATE}": counts,
        f"{version}/{RUN_CONFIG}": PlainFile(yaml_bytes(settings)),
        **{f"{version}/tokenizer/{name}": copy for name, copy in tokenizer.items()},
    }


def _counts(iteration: int, training: TrainingState) -> dict[str, Constant]:
    """The entries of Bridge's TrainState, each a tensor without axes."""
    counted = {
        "step": iteration,
        "consumed_train_samples": training.consumed_train_samples,
        "skipped_train_samples": 0,
    }
    counted["consumed_valid_samples"] = training.consumed_valid_samples
    numbers = {
        name: Constant((), "int64", np.int64(value).tobytes()) for name, value in counted.items()
    }
    operations = np.float64(training.floating_point_operations).tobytes()
    phases = dict.fromkeys(("do_train", "do_valid", "do_test"), Constant((), "bool", b"\0"))
    return {
        **numbers,
        "floating_point_operations_so_far": Constant((), "float64", operations),
        **phases,
    }
