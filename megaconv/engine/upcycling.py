"""--num-experts: a mixture of experts, made from a dense model, or from several of one shape."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from formats.tensor import Box, LazyTensor
from formats.wording import listing
from megaconv.engine.chosen_layers import with_layers
from megaconv.engine.derived import derived_header, require_language_model
from megaconv.engine.other_models import open_other, require_weights, tell_of_settings
from megaconv.errors import (
    CheckpointError,
    NotExpressible,
    TensorMismatch,
    UnsupportedInput,
    UsageError,
)
from megaconv.families import families, family
from megaconv.families.parts.family import Family
from megaconv.input import Input
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.ir import WEIGHT, Header, Key, Source, TensorInfo
from megaconv.model.meaning import require_kept
from megaconv.model.subjects import Experts
from megaconv.model.table import canonical_shapes
from megaconv.options import ConvertOptions, LoadOptions
from megaconv.options.upcycling import Upcycling
from megaconv.values.upcycled import PartTensor, RouterTensor

_EXPERT = re.compile(r"(?P<mlp>layers\.\d+\.mlp\.)experts\.(?P<expert>\d+)\.(?P<rest>.+)")
_ROUTER = re.compile(r"(?P<mlp>layers\.\d+\.mlp\.)router\.weight")
_PLAINEST = "mixtral"
_LAST_MATRIX = "down.weight"
"""The matrix whose products are added up. In a mixture of parts, the weight of the part's expert scales each product."""


@dataclass(frozen=True)
class Upcycled:
    """A mixture whose experts are the MLPs of dense models."""

    whole: Source
    """The dense model that everything but the experts is of."""
    header: Header
    origins: Mapping[Key, Key]
    """Experts -> the tensors of a dense model that they are, or are parts of."""
    notices: Sequence[str]
    """For people: what becomes of each MLP."""
    experts_of: Sequence[Source]
    """The dense models that the experts are of, in turn."""
    granularity: int

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield the tensors in the order of the manifest."""
        found = dict(self.whole.tensors())
        models = [found if each is self.whole else dict(each.tensors()) for each in self.experts_of]
        for key, info in self.header.manifest.items():
            expert = _EXPERT.fullmatch(key.name)
            if expert is not None:
                group, part = divmod(int(expert["expert"]), self.granularity)
                dense = models[group % len(models)][self.origins[key]]
                yield key, self._expert(key, dense, part)
            elif key in found:
                yield key, found[key]
            else:
                yield key, RouterTensor(info.shape, info.dtype, key.name, self.granularity)

    def _expert(self, key: Key, dense: LazyTensor, part: int) -> LazyTensor:
        """A matrix of an expert: a dense one, or its part of this number."""
        if self.granularity == 1:
            return dense
        rows, cols = self.header.manifest[key].shape
        is_last = key.name.endswith(_LAST_MATRIX)
        box = (
            Box(0, rows, part * cols, (part + 1) * cols)
            if is_last
            else Box(part * rows, (part + 1) * rows, 0, cols)
        )
        return PartTensor(dense, box, key.name, self.granularity if is_last else 1)


def with_experts(
    source: Source, found: Input, load: LoadOptions, options: ConvertOptions
) -> Upcycled:
    """The mixture of an opened dense model. load: the options that it was opened with.

    Raises UnsupportedInput for models that aren't dense, NotExpressible if no family has such experts, TensorMismatch for
    models of other shapes, and UsageError.
    """
    chosen, header = options.upcycling, source.header
    _require_dense(header, found.given)
    config = _mixture(header.config, chosen)
    manifest, origins = _manifest(header, config, chosen.granularity)
    models = []
    for place in chosen.experts_of:
        other = open_other(place, load, options)
        require_weights(place, other.header, "experts")
        if options.layers is not None:
            other = with_layers(other, options.layers, place)
        _require_alike(found.given, header, place, other.header, set(origins.values()))
        tell_of_settings(found.given, header, place, other.header)
        models.append(other)
    is_altered = bool(models) or chosen.granularity > 1
    made = replace(
        derived_header(header, config, manifest, origins, altered=origins if is_altered else ()),
        layout=header.layout and replace(header.layout, etp=header.layout.tp),
    )
    return Upcycled(
        source, made, origins, [_notice(config, chosen)], models or [source], chosen.granularity
    )


def _require_dense(header: Header, place: str) -> None:
    """Raise UnsupportedInput for a model whose MLPs can't become experts."""
    require_language_model(header, place, "--num-experts")
    if header.config.experts.count:
        raise UnsupportedInput(
            f"--num-experts: {place} has {header.config.experts.count} experts already; expected a dense model"
        )


def _mixture(config: ModelConfig, chosen: Upcycling) -> ModelConfig:
    """The configuration of the mixture. Raises UsageError, and NotExpressible if no family has such a model."""
    width, rest = divmod(config.mlp.ffn, chosen.granularity)
    if rest:
        raise UsageError(
            f"--moe-upcycling-granularity {chosen.granularity}: the width of the MLPs, {config.mlp.ffn}, can't be divided by it"
        )
    kinds = tuple(
        replace(kind, mlp="experts") if kind.mlp == "dense" else kind for kind in config.layers
    )
    assert chosen.experts is not None, "experts were asked for"
    # A dense model may say how a router would weigh experts (Jamba). Here their weights have to add up to 1.
    experts = Experts(count=chosen.experts, per_token=chosen.topk, ffn=width)
    made = replace(config, layers=kinds, experts=experts, hf=None)
    refusals = {each.name: _refusal(made, each) for each in families().values()}
    fitting = [name for name, reason in refusals.items() if reason is None]
    if not fitting:
        raise NotExpressible(
            f"--num-experts: no family has experts and the other parts of this {config.family}. {_PLAINEST}, the plainest one, lacks "
            f"some: {refusals[_PLAINEST]}"
        )
    name = min(fitting, key=lambda name: not _is_usual(made, family(name)))
    made = replace(made, family=name)
    return replace(made, hf=_own_config(config, made))


def _own_config(dense: ModelConfig, mixture: ModelConfig) -> Mapping[str, Any] | None:
    """The mixture's config.json: the dense model's, with the keys of the other family; None if that isn't known.

    A key that the dense model's family doesn't write stays, unless the mixture's family reads it otherwise.
    """
    if dense.hf is None:
        return None
    before, after = family(dense.family), family(mixture.family)
    own: dict[str, Any] = json.loads(before.config_json(dense))
    dropped = {*before.write_hf(dense), *before.aliases, "auto_map", "dtype"}
    kept = {
        key: value
        for key, value in own.items()
        if key not in dropped and not re.search("expert|router|moe", key)
    }
    made = {**kept, **after.write_hf(mixture)}
    try:
        require_kept(mixture, after.read_hf(made), "its config.json", but=NOT_COMPUTED)
    except CheckpointError:
        return None
    return made


def _is_usual(config: ModelConfig, candidate: Family) -> bool:
    """True for the family that a Megatron checkpoint of this model would be taken for."""
    return candidate.recognized is not None and config.has(candidate.recognized)


def _refusal(config: ModelConfig, candidate: Family) -> str | None:
    """The reason why a family has no such model; None if it has."""
    named = replace(config, family=candidate.name)
    try:
        back = candidate.read_hf(candidate.write_hf(named))
        require_kept(named, back, f"a {candidate.name}", but=NOT_COMPUTED)
    except CheckpointError as error:
        return str(error)
    return None


def _manifest(
    header: Header, config: ModelConfig, granularity: int
) -> tuple[dict[Key, TensorInfo], dict[Key, Key]]:
    """(the tensors of the mixture in model order, its experts -> the dense model's tensors). Raises NotExpressible."""
    dense = header.manifest
    manifest: dict[Key, TensorInfo] = {}
    origins: dict[Key, Key] = {}
    unlike = {key.name for key in dense if key.slot == WEIGHT}
    for name, shape in canonical_shapes(family(config.family).rows, config).items():
        key, expert, router = Key(name), _EXPERT.fullmatch(name), _ROUTER.fullmatch(name)
        origin = Key(f"{expert['mlp']}{expert['rest']}") if expert else key
        if router:
            manifest[key] = TensorInfo(shape, dense[Key(f"{router['mlp']}{_LAST_MATRIX}")].dtype)
            continue
        if origin not in dense or (not expert and dense[origin].shape != shape):
            unlike.add(name)
            continue
        if granularity > 1 and expert and len(shape) == 1:
            raise NotExpressible(
                f"--moe-upcycling-granularity: {origin} is a bias, which can't be cut into parts; leave the option out"
            )
        manifest[key] = TensorInfo(shape, dense[origin].dtype)
        unlike.discard(origin.name)
        if expert:
            origins[key] = origin
    if unlike:
        raise NotExpressible(
            f"--num-experts: {listing(sorted(unlike))} of a {header.config.family} has no place in a {config.family}"
        )
    return manifest, origins


def _require_alike(
    given: str, ours: Header, place: str, theirs: Header, needed: Collection[Key]
) -> None:
    """Raise TensorMismatch unless another model's MLPs have the shapes and dtypes of the input's."""
    for key in sorted(needed):
        info, expected = theirs.manifest.get(key), ours.manifest[key]
        if info is None or info.shape != expected.shape:
            found = "isn't there" if info is None else f"has the shape {list(info.shape)}"
            raise TensorMismatch(
                f"--experts-of {place}: {key} {found}, and has the shape {list(expected.shape)} in {given}; expected a model of these "
                "shapes"
            )
        if info.dtype != expected.dtype:
            raise TensorMismatch(
                f"--experts-of {place}: {key} is {info.dtype}, and {expected.dtype} in {given}; convert one of them with --dtype first"
            )


def _notice(config: ModelConfig, chosen: Upcycling) -> str:
    """A line for people: what becomes of each MLP."""
    parts = "" if chosen.granularity == 1 else f", each a part of {chosen.granularity}"
    parts += f", in turn of {', '.join(chosen.experts_of)}" if chosen.experts_of else ""
    return f"each MLP becomes {config.experts.count} experts of a {config.family}{parts}; a token has {config.experts.per_token} of them"
