"""What a random journey is made of: a model with all its files, the places that it goes to, and changes on the way."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import families, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from tests.config_models import SCALED, SCALINGS
from tests.engine.test_chains import random_bits, random_target, write_model
from tests.engine.test_new_tokenizer import write_tokenizer

Options = dict[str, Any]

FAMILIES = sorted(families().keys() - {"biencoder", "retro"})
"""All families with a config.json."""
TOKENS = 270
"""More than the tokens of the tokenizer that some models have."""
FILES = {
    "generation_config.json": '{"eos_token_id": [2, 3], "temperature": 0.7}',
    "chat_template.jinja": "{{ messages }}",
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "preprocessor_config.json": "{}",
    "LICENSE": "free",
}
"""Files beside a model that every format keeps."""


def write_traveller(path: Path, random: Random, *, changes: bool) -> Path:
    """A Hugging Face directory with random settings and files. changes: its values are numbers that can be computed with."""
    config = write_possible(FAMILIES, path, random, ordinary if changes else random_bits)
    for name, content in FILES.items():
        if random.random() < 0.5:
            (path / name).write_text(content)
    if config.vocab == TOKENS:
        write_tokenizer(path)
    return path


def write_possible(
    names: Sequence[str], path: Path, random: Random, values: Callable[..., torch.Tensor]
) -> ModelConfig:
    """Write a model of one of these families. Models are drawn until a family has one of these sizes."""
    while True:
        family = random.choice(names)
        try:
            write_model(family, path, random, settings(family, random), values)
        except CheckpointError:
            shutil.rmtree(path)
        else:
            return read_config(path / CONFIG_NAME)[1]


def ordinary(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Values as weights have them."""
    if name.endswith("linear_attn.norm.weight"):
        return random_bits(name, shape, dtype, generator)
    return (torch.randn(shape, generator=generator) / 20).to(dtype)


def settings(family: str, random: Random) -> Options:
    """Keys of config.json that any model of the family may have."""
    found: Options = {
        "eos_token_id": random.choice((2, [2, 3], None)),
        "pad_token_id": random.choice((0, 3, None)),
        "key_of_nobody": {"of": [1, 2]},
        "use_cache": random.random() < 0.5,
    }
    if random.random() < 0.3:
        found["vocab_size"] = TOKENS
    if random.random() < 0.3:
        found["decoder_sparse_step"] = 2
    if family in SCALED and random.random() < 0.5:
        scaling = random.choice(list(SCALINGS.values()))
        found |= {"rope_theta": random.choice((1e4, 5e5)), "rope_scaling": scaling}
    return found


def target(config: ModelConfig, random: Random) -> Options:
    """Any saver of which a Hugging Face directory comes back as it was, at any layout and in any form."""
    while True:
        found = random_target(config.family, random, experts=config.experts.count > 0)
        if found["saver"] != "llama_mistral":  # params.json takes the place of config.json
            break
    if found["saver"] == "dcp" and random.random() < 0.5:
        found = random.choice(OTHER_NAMES)
    if found["saver"] == "hf":
        found["max_shard_size"] = random.choice((1, 3000, "5GB"))
    if found["saver"] == "core":
        found |= form_of_core(found, config.layer_count, random)
    return {**found, "workers": random.randint(1, 3), "verify": random.random() < 0.2}


OTHER_NAMES: tuple[Options, ...] = (
    {"saver": "dcp", "options": {"names": "transformers-stacked"}, "dist_files": 3},
    {"saver": "dcp", "options": {"names": "torchtitan-0.3"}},
    {"saver": "deepspeed"},
    {"saver": "deepspeed", "options": {"experts": "separate"}},
)


def form_of_core(chosen: Options, layers: int, random: Random) -> Options:
    """More options of a core output. layers: the model's number of layers."""
    found: Options = {"vocab_padding": random.choice(("repeat", "zero"))}
    if chosen["ckpt_format"] == "torch_dist":
        found["dist_files"] = random.randint(1, 5)
    if chosen["pp"] > 1 and "vpp" not in chosen and random.random() < 0.5:
        found |= uneven_stages(chosen["pp"], layers, random)
    return found


def uneven_stages(pp: int, layers: int, random: Random) -> Options:
    cuts = sorted(random.randint(0, layers) for _ in range(pp - 1))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    return random.choice(
        (
            {"layer_split": sizes},
            {"decoder_first_pipeline_num_layers": random.randint(1, layers)},
            {"decoder_last_pipeline_num_layers": random.randint(1, layers)},
            {"account_for_embedding_in_pipeline_split": True},
        )
    )


def change(config: ModelConfig, random: Random) -> Options:
    """Options that make another model."""
    layers = range(config.layer_count)
    count = random.randint(1, config.layer_count + 1)
    return random.choice(
        (
            {"layers": [random.choice(layers) for _ in range(count)]},
            {"vocab_size": config.vocab + random.randint(1, 30), "new_rows": "mean"},
            {"vocab_size": max(4, config.vocab - random.randint(1, 30))},
            {"num_experts": 2},
            {"dtype": random.choice(("bf16", "fp16", "fp32"))},
        )
    )


def attempt(folder: Path, call: Callable[..., object], *places: Path, **options: Any) -> bool:
    """Call it; False if it is refused. A refusal is one line, and leaves nothing in the folder."""
    before = {path.name for path in folder.iterdir()}
    refusal = None
    try:
        call(*places, **options)
    except CheckpointError as error:
        refusal = str(error)
    if refusal is None:
        return True
    assert "\n" not in refusal
    assert {path.name for path in folder.iterdir()} == before
    return False


def moved(at: Path, output: Path, config: ModelConfig, random: Random) -> Path:
    """The model in another format or layout at `output`, or where it is, if none of some targets can have it."""
    for _ in range(4):
        options = target(config, random)
        if attempt(output.parent, megaconv.convert, at, output, **options):
            return output
    return at


def write_lora(path: Path, model: Path, random: Random) -> Path:
    """A LoRA of some kinds of a model's linear layers, in some or all of its layers."""
    held = load_file(model / "model.safetensors")
    paths = [name.removesuffix(".weight") for name in held if is_linear(name, held[name])]
    kinds = sorted({each.rpartition(".")[2] for each in paths})
    chosen = random.sample(kinds, random.randint(1, len(kinds)))
    found = [each for each in paths if each.rpartition(".")[2] in chosen]
    found = random.sample(found, random.randint(1, len(found)))
    rank = random.choice((1, 2, 4))
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    tensors: dict[str, torch.Tensor] = {}
    for each in found:
        outs, ins = held[f"{each}.weight"].shape
        for letter, shape in (("A", (rank, ins)), ("B", (outs, rank))):
            drawn = torch.randn(shape, generator=generator) / 8
            tensors[f"base_model.model.{each}.lora_{letter}.weight"] = drawn
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": found}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """True for the weight of a linear layer of attention or an MLP."""
    is_matrix = tensor.ndim == 2 and name.endswith("_proj.weight")
    return is_matrix and ("attn." in name or "mlp." in name)


def other_weights(model: Path, output: Path, random: Random) -> Path:
    """A copy of a model with steps in some elements of its matrices. Embeddings and heads may have copies, and stay."""
    shutil.copytree(model, output)
    (output / "megaconv.json").unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    held = load_file(output / "model.safetensors")
    for name, tensor in held.items():
        if is_linear(name, tensor):
            step = torch.rand(tensor.shape, generator=generator) < 0.4
            held[name] = torch.where(step, (tensor.float() * 1.25).to(tensor.dtype), tensor)
    save_file(held, output / "model.safetensors", metadata={"format": "pt"})
    return output


def run_in_temporary_directory(run: Callable[[int, Path], None], number: int) -> None:
    """Run the journey of a number."""
    with tempfile.TemporaryDirectory() as folder:
        run(number, Path(folder))


def keys_of(path: Path) -> Options:
    """The keys of a config.json."""
    return dict(json.loads((path / CONFIG_NAME).read_text()))
