"""A source with adapters merged into its tensors, one after the other. All other tensors stay unchanged."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from formats.regular_files import read_small
from formats.tensor import InputFile, LazyTensor
from formats.wording import counted
from megaconv.adapters.initialization import Remainder, removed_parts
from megaconv.adapters.low_rank import MergedTensor
from megaconv.adapters.opening import open_adapter
from megaconv.adapters.peft_files import CONFIG, OLORA, PISSA, Adapter
from megaconv.adapters.scored_head import notice_of_head
from megaconv.adapters.targets import Changes, changes_of
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.hub import resolve
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, Source, TensorInfo, shift_of
from megaconv.model.table import canonical_shapes
from megaconv.options import AdapterChoice
from megaconv.values.cast import CastTensor

_HASHED_AT_ONCE = 8 << 20
_INITIALIZATIONS = {PISSA: "PiSSA", OLORA: "OLoRA"}


@dataclass(frozen=True)
class Merged:
    """One adapter, and the changes that it makes to the model."""

    choice: AdapterChoice
    adapter: Adapter
    changes: Changes
    removed: Mapping[str, LazyTensor] = field(default_factory=dict)
    """The part of each weight that the training took out of the base, by canonical name."""

    @property
    def needs_the_base(self) -> bool:
        """True if the adapter was computed from the base's own weights, which no other adapter may change."""
        return self.adapter.config.dora or bool(self.removed)

    @property
    def summary(self) -> str:
        """A line for people: which adapter was merged, and how."""
        config, count = self.adapter.config, len(self.adapter.modules)
        kind = "LoRA"
        if config.initialization:
            kind = _INITIALIZATIONS[config.initialization]
        elif config.dora:
            kind = "DoRA"
        elif config.rslora:
            kind = "rsLoRA"
        weight = "" if self.choice.weight == 1 else f" times {self.choice.weight:g}"
        replaced = len(self.adapter.replaced)
        copied = f", {counted(replaced, 'tensor')} replaced by its own" if replaced else ""
        return f"merged {kind} adapter {self.choice.place}{weight}: {counted(count, 'module')} of rank {config.rank}{copied}"

    def to_json(self) -> dict[str, Any]:
        """The entry for megaconv.json. Reads the adapter's weights."""
        return {
            "path": self.choice.place,
            "weight": self.choice.weight,
            "base": self.adapter.config.base,
            "sha256": _sha256(self.adapter.weights),
            "config_sha256": hashlib.sha256(
                read_small(self.adapter.directory / CONFIG, SIDECAR_BYTES)
            ).hexdigest(),
        }


def _sha256(path: Path) -> str:
    file, hashed = InputFile.open(path), hashlib.sha256()
    for offset in range(0, file.size, _HASHED_AT_ONCE):
        hashed.update(file.read(offset, min(_HASHED_AT_ONCE, file.size - offset)))
    return hashed.hexdigest()


@dataclass(frozen=True)
class MergedSource:
    """A source of weights with adapters merged into them. Each weight keeps its dtype."""

    source: Source
    merged: Sequence[Merged]
    overflow: bool = False
    """True to accept weights that become infinite."""
    tokenizer: Mapping[str, Path] = field(default_factory=dict)
    """Files of the tokenizer beside the adapter `resized_by`, which replace the base's."""
    vectors: Mapping[str, Path] = field(default_factory=dict)
    """sentence-transformers' files beside the adapters, which replace the base's."""

    @property
    def config(self) -> ModelConfig:
        return self.merged[-1].changes.config

    @property
    def changed(self) -> frozenset[Key]:
        """Keys of tensors whose values differ from the source's.

        They include a head that an adapter unties from the embedding.
        """
        names = {
            name
            for each in self.merged
            for name in (*each.changes.deltas, *each.changes.replaced, *each.changes.tokens)
        }
        return frozenset(map(Key, names)) | (
            self.header.manifest.keys() - self.source.header.manifest.keys()
        )

    @property
    def header(self) -> Header:
        header = self.source.header
        replaced = {
            Key(name): lazy for each in self.merged for name, lazy in each.changes.replaced.items()
        }
        shifts = {key: shift for key, shift in header.shifts.items() if key not in replaced}
        shifts |= {key: shift_of(tensor) for key, tensor in replaced.items() if shift_of(tensor)}
        return replace(
            header,
            config=self.config,
            manifest=self._manifest(header),
            shifts=shifts,
            files={**header.files, **self.tokenizer, **self.vectors},
        )

    @property
    def resized_by(self) -> Path | None:
        """The directory of the last adapter that changes the number of tokens; None if there is none."""
        vocab, found = self.source.header.config.vocab, None
        for each in self.merged:
            found = each.adapter.directory if each.changes.config.vocab != vocab else found
            vocab = each.changes.config.vocab
        return found

    def _manifest(self, header: Header) -> Mapping[Key, TensorInfo]:
        before, now = header.config, self.config
        is_tied_as_before = now.tie_embeddings == before.tie_embeddings
        has_same_head = now.head.labels == before.head.labels
        if is_tied_as_before and has_same_head and now.vocab == before.vocab:
            return header.manifest
        shapes = canonical_shapes(family(self.config.family).rows, self.config)
        tied = header.manifest[Key("embed.weight")]
        return {
            Key(name): header.manifest.get(Key(name), tied)._replace(shape=shape)
            for name, shape in shapes.items()
        }

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        found = dict(self.source.tensors())
        for key in self.header.manifest:
            tensor = found[key] if key in found else found[Key("embed.weight")]
            for each in self.merged:
                tensor = _changed(key.name, tensor, each, self.overflow)
            yield key, tensor

    @property
    def notices(self) -> tuple[str, ...]:
        before = self.source.header.config
        untied = self.config.tie_embeddings != before.tie_embeddings
        found = [each.summary for each in self.merged]
        of_head = notice_of_head(before, self.config)
        if of_head is not None:
            found.append(of_head)
        elif untied:
            found.append("head and embedding are no longer tied: the adapter changes one of them")
        if any(each.removed for each in self.merged):
            found.append(
                "the parts of the base that PiSSA and OLoRA took out are computed again: the last bits may differ from peft's"
            )
        found += self._notices_of_vocabulary()
        if (self.source.header.config.hf or {}).get("quantization_config"):
            found.append("the base is quantized: adapters are merged into its dequantized weights")
        return tuple(found)

    def _notices_of_vocabulary(self) -> list[str]:
        before, after = self.source.header.config.vocab, self.config.vocab
        if before == after:
            return []
        tokenizer = (
            "the tokenizer is the adapter's"
            if self.tokenizer
            else "the adapter's directory has no tokenizer, so copy the one of the training to the output"
        )
        return [f"the vocabulary has {after} tokens instead of {before}; {tokenizer}"]


def _changed(name: str, tensor: LazyTensor, merged: Merged, overflow: bool) -> LazyTensor:
    changes = merged.changes
    if name in changes.replaced:
        own = changes.replaced[name]
        tensor = own if own.dtype == tensor.dtype else CastTensor(own, tensor.dtype, name, overflow)
    if name in merged.removed:
        tensor = Remainder(tensor, merged.removed[name], name)
    change = changes.deltas.get(name)
    if change is not None:
        tensor = MergedTensor(tensor, change, name, overflow)
    rows = changes.tokens.get(name)
    return tensor if rows is None else rows.put_into(tensor, name, overflow=overflow)


def merge(
    source: Source, choices: Sequence[AdapterChoice], *, overflow: bool = False
) -> MergedSource:
    """Open adapters and check them against a source. Raises CheckpointError.

    overflow: True to accept weights that become infinite. Without it, reading such a tensor raises NotExpressible.
    """
    config = source.header.config
    merged: list[Merged] = []
    if source.header.carries_optimizer:
        raise UsageError(
            "--adapter: weights that an adapter changes no longer go with the optimizer's state; add --no-optimizer"
        )
    for choice in choices:
        place = resolve(choice.place)
        if isinstance(place, str):
            raise UsageError(f"--adapter {place}: expected a directory or a Hub id")
        adapter = open_adapter(place, with_base=True)
        if adapter.directory != place:  # an iteration of a run: the record names the iteration
            run = choice.place.rstrip("/")
            choice = choice._replace(place=f"{run}/{adapter.directory.name}")
        changes = changes_of(adapter, choice.weight, family(config.family), config)
        changed_before = [name for each in merged for name in each.changes.deltas]
        again = [name for name in changed_before if name in changes.deltas]
        tensors = dict(source.tensors()) if adapter.config.initialization else {}
        removed = removed_parts(
            adapter, choice.weight, family(config.family), changes.config, tensors
        )
        merged.append(Merged(choice, adapter, changes, removed))
        if again and any(each.needs_the_base for each in merged):
            raise NotExpressible(
                f"{adapter.weights}: {again[0]} has two adapters, one of them DoRA, PiSSA or OLoRA, "
                "which is about the base's own weights"
            )
        config = changes.config
    return MergedSource(source, merged, overflow)
