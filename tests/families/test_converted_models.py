"""Models that are converted and not trained: transformers computes the same logits from what we write.

The config.json that it reads is one that we write ourselves, from the description of the model alone.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import megaconv
from megaconv.errors import NotExpressible
from megaconv.families import family, read_config
from megaconv.model.fields import lost_fields
from tests.transformers_oracle import CONVERTED, compute, create, family_of, load

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("converted")
    for name, variant in CONVERTED.items():
        create(variant, root / name)
    return {name: root / name for name in CONVERTED}


def write_own_config(source: Path, output: Path, **settings: object) -> None:
    """Replace config.json by the one that its description alone gives."""
    path = output / "config.json"
    path.write_text(json.dumps(json.loads((source / "config.json").read_text()) | settings))
    found, config = read_config(path)
    path.write_bytes(found.config_json(replace(config, hf=None)))


@pytest.mark.parametrize("name", CONVERTED)
def test_transformers_computes_the_same_logits_from_what_is_written(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    source, output = sources[name], tmp_path / "out"
    assert megaconv.convert(source, output, saver="hf", verify=True, workers=1).verified
    tokens = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))
    expected = compute(load(source), tokens)
    assert torch.equal(compute(load(output), tokens), expected)
    write_own_config(source, output)
    assert torch.equal(compute(load(output), tokens), expected)
    for words, settings in CONVERTED[name].others.items():
        write_own_config(source, output, **settings)
        other = compute(load(output), tokens)
        assert not torch.equal(other, expected), words
        assert torch.equal(compute(load(source, **settings), tokens), other), words


@pytest.mark.parametrize("name", CONVERTED)
def test_every_other_setting_is_another_model(name: str, sources: dict[str, Path]) -> None:
    raw = json.loads((sources[name] / "config.json").read_text())
    table = family(family_of(CONVERTED[name]))
    for words, settings in CONVERTED[name].others.items():
        assert lost_fields(table.read_hf(raw), table.read_hf(raw | settings)), words


@pytest.mark.parametrize("name", CONVERTED)
def test_megatrons_formats_are_refused_at_once(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    for saver in ("core", "legacy"):
        with pytest.raises(NotExpressible, match="has no names in Megatron's formats"):
            megaconv.convert(sources[name], tmp_path / "out", saver=saver)
    assert not list(tmp_path.iterdir())
