"""Tables made from Llama's rows, for models that differ only in the norms' biases, a gate or some names.

in_core(rows)            without names in Megatron's legacy models and Meta's files
hf_only(rows)            with Hugging Face's names alone
with_norm_biases(rows)   LayerNorm: model.norm.{weight|bias}, decoder.final_layernorm.{weight|bias}
without_gate(rows)       mlp.up_proj, mlp.down_proj; linear_fc1 holds only the first
respelled(rows, names)   other names for some rows
with_modules(rows, ...)  other names of Hugging Face's modules
with_shared_norm(rows)   one norm before attention and the MLP
without_norms(rows)      norms without trained values
without_rows(rows, ...)  without some rows
without_biases(rows)     without biases of matrices
with_head_bias(rows)     a bias per token of the vocabulary
with_shorter_head(rows)  no rows of the head for the last tokens

with_optional_norm_biases(rows), with_optional_gate(rows)   for a table of models with and without them
"""

from collections.abc import Mapping
from dataclasses import replace

from megaconv.model.table import Row, Separate, Spelling

Rows = tuple[Row, ...]
_GATE_UP = "{gate|up}"


def in_core(rows: Rows) -> Rows:
    """The rows with only the names of Hugging Face and Megatron core. Any other naming scheme is then refused for lack
    of names."""
    return tuple(row.without("legacy", "meta") for row in rows)


def hf_only(rows: Rows) -> Rows:
    """The rows with only Hugging Face's names, for models whose layers Megatron core lacks."""
    return tuple(row.without("core", "legacy", "meta") for row in rows)


def with_norm_biases(rows: Rows) -> Rows:
    """The rows with biases on the norms of hidden states. Norms of q and k, which are shorter, have none."""

    return tuple(_with_bias(row) if _is_norm(row) else row for row in rows)


def _is_norm(row: Row) -> bool:
    return row.canonical.endswith("_norm.weight") and row.shapes == ("hidden",)


def _with_bias(row: Row) -> Row:
    names = {}
    for key, spelled in row.names.items():
        names[key] = tuple(replace(one, name=_weight_and_bias(one.name)) for one in spelled)
    return replace(
        row, canonical=_weight_and_bias(row.canonical), shapes=row.shapes * 2, names=names
    )


def _weight_and_bias(name: str) -> str:
    return name.removesuffix("weight") + "{weight|bias}"


def without_gate(rows: Rows) -> Rows:
    """The rows with MLPs of two matrices."""

    return tuple(_only_up(row) if _GATE_UP in row.canonical else row for row in rows)


def _only_up(row: Row) -> Row:
    names = {}
    for key, spelled in row.names.items():
        names[key] = tuple(Separate(one.name.replace(_GATE_UP, "up")) for one in spelled)
    return replace(
        row, canonical=row.canonical.replace(_GATE_UP, "up"), shapes=row.shapes[:1], names=names
    )


def respelled(rows: Rows, names: Mapping[str, Mapping[str, Spelling]]) -> Rows:
    """The rows with other names for some of them. Raises KeyError for an unknown row.

    names: canonical pattern of a row -> its names by naming scheme.
    """
    known = {row.canonical for row in rows}
    for canonical in names:
        if canonical not in known:
            raise KeyError(f"no row of the table is {canonical}")
    return tuple(row.renamed(**names.get(row.canonical, {})) for row in rows)


def in_all_forms(rows: Rows, names: Mapping[str, Spelling]) -> Rows:
    """The rows with other names, which are the same in all forms of Hugging Face's files.

    names: canonical pattern of a row -> its name.
    """
    forms = ("hf", "hf_stacked", "hf_stacked_transposed")
    return tuple(
        row.renamed(**dict.fromkeys(forms, names[row.canonical])) if row.canonical in names else row
        for row in rows
    )


def with_modules(rows: Rows, modules: Mapping[str, str]) -> Rows:
    """The rows with other names of modules in Hugging Face's files. Raises KeyError for an unknown module.

    modules: part of a name -> what replaces it, such as `self_attn.o_proj` -> `self_attn.dense`.
    """
    unknown = set(modules)

    def renamed(name: str) -> str:
        for module, other in modules.items():
            if module in name:
                unknown.discard(module)
                name = name.replace(module, other)
        return name

    changed = []
    for row in rows:
        spelled = tuple(replace(one, name=renamed(one.name)) for one in row.names["hf"])
        changed.append(row.renamed(hf=spelled))
    if unknown:
        raise KeyError(f"no row of the table has {', '.join(sorted(unknown))}")
    return tuple(changed)


def with_shared_norm(rows: Rows) -> Rows:
    """The rows with one norm before attention and the MLP. In core, it is not fused with a matrix."""
    first, second = ("layers.{l}.input_norm.", "layers.{l}.mlp_norm.")
    changed = []
    for row in rows:
        if row.canonical.startswith(first):
            kind = row.canonical.removeprefix(first)
            row = row.renamed(core=f"decoder.layers.{{l}}.input_layernorm.{kind}")
        if not row.canonical.startswith(second):
            changed.append(row)
    return tuple(changed)


def without_norms(rows: Rows) -> Rows:
    """The rows without those of norms of hidden states, for norms that have no trained values."""
    return tuple(row for row in rows if not _is_norm(row))


def without_rows(rows: Rows, *canonical: str) -> Rows:
    """The rows without some of them. Raises KeyError for an unknown row."""
    known = {row.canonical for row in rows}
    for name in canonical:
        if name not in known:
            raise KeyError(f"no row of the table is {name}")
    return tuple(row for row in rows if row.canonical not in canonical)


def without_biases(rows: Rows) -> Rows:
    """The rows without those of biases, for architectures whose matrices never have any."""
    return tuple(row for row in rows if not row.canonical.endswith(".bias"))


def with_embedding_norm(rows: Rows, name: str) -> Rows:
    """The rows, and one for the LayerNorm after the embedding. name: Hugging Face's name of the module."""
    norm = Row(
        "embed_norm.{weight|bias}", ("hidden", "hidden"), stage="first", when="embedding_norm",
        hf=f"{name}.{{weight|bias}}",
        core="embedding.norm.{weight|bias}",
    )  # fmt: skip
    return (*rows, norm)


def with_positions(rows: Rows, name: str) -> Rows:
    """The rows, and one for learned positions. name: Hugging Face's name of the module."""
    positions = Row(
        "positions.weight", ("position_rows hidden",), stage="first",
        hf=f"{name}.weight",
        core="embedding.position_embeddings.weight",
    )  # fmt: skip
    return (*rows, positions)


def with_head_bias(rows: Rows) -> Rows:
    """The rows, and one for the bias of the head."""
    bias = Row(
        "head.bias", ("vocab",), tp=0, stage="last", when="head_bias", padded_vocab=True,
        hf="lm_head.bias",
        core="output_layer.bias",
    )  # fmt: skip
    return (*rows, bias)


def with_shorter_head(rows: Rows) -> Rows:
    """The rows, with a head that has no rows for the last tokens."""
    return tuple(
        row.shaped("predicted hidden") if row.canonical == "head.weight" else row for row in rows
    )


def with_optional_norm_biases(rows: Rows) -> Rows:
    """The rows, and for each norm of hidden states a row with its bias, for models with LayerNorm."""
    return tuple(made for row in rows for made in _and_bias(row))


def _and_bias(row: Row) -> Rows:
    if not _is_norm(row):
        return (row,)
    names = {
        key: tuple(replace(one, name=one.name.removesuffix("weight") + "bias") for one in spelled)
        for key, spelled in row.names.items()
    }
    bias = replace(
        row,
        canonical=row.canonical.removesuffix("weight") + "bias",
        when=f"{row.when} norm_bias" if row.when else "norm_bias",
        names=names,
    )
    return row, bias


def with_optional_gate(rows: Rows) -> Rows:
    """The rows, and for each MLP matrix with a gate a row without one, for models without gates."""
    return tuple(made for row in rows for made in _and_ungated(row))


def _and_ungated(row: Row) -> Rows:
    if _GATE_UP not in row.canonical:
        return (row,)
    plain = replace(_only_up(row), when=f"{row.when} plain")
    return replace(row, when=f"{row.when} gated"), plain
