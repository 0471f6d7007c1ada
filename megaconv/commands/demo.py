"""`megaconv demo`: converts a small Llama with a real tokenizer to Megatron, reshards it, and proves the way back."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from formats.safetensors import SafetensorsLayout
from formats.staged_file import write_error
from megaconv.commands.comparison import diff_sources
from megaconv.commands.inspection import inspect
from megaconv.engine.conversion import convert, fingerprint
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.errors import ModelsDiffer, TargetExists
from megaconv.families.llama import FAMILY
from megaconv.input import find_input
from megaconv.model.naming import HF
from megaconv.model.natives import unsharded_tensors
from megaconv.options import ConvertOptions, SaveOptions
from megaconv.values.rounding import rounded

_TEXT = """A checkpoint is a model at rest. Its tensors have names, shapes and values, and every tool has its own idea of
how they should be named, fused, sharded and stored. Converting one means to move every value to its new place, and to
change none of them. This small text trains the tokenizer of a small model, which knows nothing and says nothing, but
has everything that a large one has: an embedding, layers with attention and a gated perceptron, norms, and a head."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_model(path: Path) -> None:
    """Create a Llama with random weights and a byte-pair tokenizer, in the files that transformers would save.

    Raises TargetExists, and the errors of write_error. A part of the model doesn't stay.
    """
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise TargetExists(f"{path}: already exists; choose another place, or remove it") from None
    except OSError as error:
        raise write_error(error, path) from error
    try:
        _write_model(path)
    except BaseException as error:
        rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(error, path) from error
        raise


def _write_model(path: Path) -> None:
    vocab = _make_tokenizer(path)
    config = _CONFIG | {"vocab_size": vocab}
    generation = {"bos_token_id": 0, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "generation_config.json").write_text(json.dumps(generation) + "\n")
    _write_weights(path / "model.safetensors", _shapes(config))


def _write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write random bfloat16 weights, the same every time."""
    layout = SafetensorsLayout({name: (shape, "bfloat16") for name, shape in shapes.items()})
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for offset, data in layout.headers({}):
            file.seek(offset)
            file.write(data)
        for name, shape in shapes.items():
            file.seek(layout.records[name].offset)
            values = random.standard_normal(shape, np.float32) * np.float32(0.02)
            file.write(rounded(values.reshape(-1), "bfloat16").tobytes())


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The Hugging Face name and shape of every tensor."""
    model = FAMILY.read_hf(config)
    return {native.name: native.shape for native in unsharded_tensors(FAMILY.rows, model, HF)}


def _make_tokenizer(path: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=401,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    text = tokenizer.to_str(pretty=True)  # its save() would raise a plain Exception on a full disk
    (path / "tokenizer.json").write_text(text, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        )
        + "\n"
    )
    return int(tokenizer.get_vocab_size())


def run(directory: Path | None) -> None:
    """Run the whole demonstration. Raises ModelsDiffer if the proof fails."""
    with _workplace(directory) as work:
        model = work / "llama"
        tp2pp2 = work / "core-tp2-pp2"
        tp4 = work / "core-tp4"
        back = work / "llama-back"
        print("1. A Llama with random weights and a trained tokenizer, in Hugging Face format")
        make_model(model)
        _show(model)
        print(
            f"\n2. megaconv convert --load-dir {model.name} --saver core --save-dir {tp2pp2.name} --tp 2 --pp 2"
        )
        convert(model, tp2pp2, "core", ConvertOptions(save=SaveOptions(tp=2, pp=2)))
        _show(tp2pp2)
        print(
            f"\n3. megaconv convert --load-dir {tp2pp2.name} --saver core --save-dir {tp4.name} --tp 4 --pp 1"
        )
        convert(tp2pp2, tp4, "core", ConvertOptions(save=SaveOptions(tp=4, pp=1)))
        _show(tp4)
        print(f"\n4. megaconv convert --load-dir {tp4.name} --saver hf --save-dir {back.name}")
        convert(tp4, back, "hf", ConvertOptions())
        _show(back)
        print("\n5. Fingerprints: hashes of all weights, whatever the format and layout")
        _prove([model, tp2pp2, tp4, back])


def _prove(places: list[Path]) -> None:
    prints = {place: fingerprint(place).weights for place in places}
    for place, digest in prints.items():
        print(f"   {place.name:<14} {digest}")
    first = open_source(find_input(places[0]))
    last = open_source(find_input(places[-1]))
    workers = default_workers(writing=False)
    have_equal_prints = len(set(prints.values())) == 1
    if not have_equal_prints or not diff_sources(first, last, workers).same:
        raise ModelsDiffer(
            "the fingerprints are not equal: the conversion changed the model; please report this"
        )
    print("   All equal: the same model, bit for bit.")


def _show(place: Path) -> None:
    print(f"   $ megaconv inspect {place.name}")
    for label, text in inspect(place).lines():
        print(f"     {label:<11} {text}")


@contextmanager
def _workplace(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, directory) from error
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="megaconv-demo-") as folder:
        yield Path(folder)
