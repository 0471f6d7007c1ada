"""Random journeys through the formats of other programs: llama.cpp, MLX, Meta, Mistral and TensorRT-LLM.

These formats keep all weights, and what the model computes. Token ids and small files may be missing, so that --config gives
them, or nothing does.
"""

from pathlib import Path
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import megaconv
from megaconv.engine.opening import open_source
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.gguf.architectures import BY_FAMILY
from megaconv.input import find_input
from megaconv.mlx.names import WRITTEN
from megaconv.model.config import ModelConfig
from megaconv.model.meaning import config_differences
from megaconv.options import LoadOptions
from tests.engine.journeys import (
    Options,
    attempt,
    ordinary,
    run_in_temporary_directory,
    target,
    write_possible,
)
from tests.engine.test_chains import check_same_weights

SHIFTED = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""Families whose norms MLX rounds."""
FAMILIES = (
    ("llama", "mistral", "mixtral", "gpt2"),
    sorted(BY_FAMILY),
    sorted({*WRITTEN} - SHIFTED),
)
PROGRAMS: tuple[Options, ...] = (
    {"saver": "gguf", "options": {"tokenizer": "none"}},
    {"saver": "mlx"},
    {"saver": "llama_mistral", "checkpoint_type": "meta", "tp": 2},
    {"saver": "llama_mistral", "checkpoint_type": "mistral"},
    {"saver": "trtllm", "tp": 2},
)
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}
HOPS = 3
TRIES = 12


def run_journey(number: int, folder: Path) -> None:
    """Run the journey of a number and check each output."""
    random = Random(number)
    source = folder / "source"
    config = write_possible(random.choice(FAMILIES), source, random, ordinary)
    expected = megaconv.fingerprint(source)
    at, made = source, list[Options]()
    for _ in range(TRIES):
        options = random.choice((random.choice(PROGRAMS), target(config, random)))
        if len(made) == HOPS or loses(config, options["saver"]):
            continue
        output = folder / f"at {len(made)}"
        known = config_of(made, source, config, random)
        asked = {**options, **known, "verify": random.random() < 0.2}
        if not attempt(folder, megaconv.convert, at, output, **asked):
            continue
        at = output
        made.append(asked)
        load = LoadOptions(**config_of(made, source, config, random))
        found = open_source(find_input(at, options=load), load).header
        differing = {name for name, *_ in config_differences(found.config, config)}
        # Without a config.json, a Mistral without a window is a Llama, and Mistral's params.json are a Mistral's.
        allowed = {*TOKENS, "family"} if config.family in ("llama", "mistral") else TOKENS
        assert differing <= allowed, (differing, made)
        assert megaconv.fingerprint(at, config=load.config) == expected, made
    back = folder / "back"
    megaconv.convert(at, back, saver="hf", config=source)
    check_same_weights(back, source, made)
    _, found_config = read_config(back / CONFIG_NAME)
    assert not list(config_differences(found_config, config)), made


def loses(config: ModelConfig, saver: str) -> bool:
    """True if a format leaves out layers for further tokens or a window that is longer than all texts, or rounds norms."""
    leaves_mtp = bool(config.mtp_layers) and saver in ("gguf", "mlx")
    rounds = config.norm.zero_centered and config.dtype == "float32"
    return leaves_mtp or (saver == "gguf" and (config.family == "mistral" or rounds))


def config_of(made: list[Options], source: Path, config: ModelConfig, random: Random) -> Options:
    """--config: sometimes for a format of another program, and always if GGUF doesn't say how positions are scaled."""
    if not made or made[-1] == {} or made[-1]["saver"] not in {each["saver"] for each in PROGRAMS}:
        return {}
    is_open = (config.positions.scaling or {}).get("rope_type") == "llama3"
    is_needed = is_open and made[-1]["saver"] == "gguf"
    return {"config": source} if is_needed or random.random() < 0.4 else {}


@given(st.integers(0, 1 << 30))
@settings(max_examples=3, phases=[Phase.generate])
def test_a_model_comes_back_from_other_programs(number: int) -> None:
    run_in_temporary_directory(run_journey, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(300))
def test_many_models_come_back_from_other_programs(number: int) -> None:
    run_in_temporary_directory(run_journey, number)
