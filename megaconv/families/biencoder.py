"""Biencoders, which retrieve texts: two BERTs, or one for both, that embed queries and contexts.

    separate towers    query_model.*  context_model.*      Megatron's BiEncoderModel and ICTBertModel
    one tower          shared_model.*                      BiEncoderModel with a shared query and context model

A tower is a BERT without its heads. An embedding is the first token after the final norm, with a projection if there is
one. ICTBertModel (Megatron-LM 2.0) has a pooler in front of the projection, and other names: `question_model`, `ict_head`.
Megatron core has no biencoder: in core's naming scheme, a tower's tensors have core BERT's names with a prefix.

A biencoder has no config.json of its own. The saver `hf` writes one for each tower (engine/sentence_directory.py).
"""

from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families import bert as plain
from megaconv.families.parts.keys import Fields, Keys, Raw
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row, Separate

QUERY, CONTEXT, SHARED = "query", "context", "shared"
TOWERS = {QUERY: "separate_towers", CONTEXT: "separate_towers", SHARED: "shared_tower"}
"""The prefix of a tower's canonical tensors -> the feature of models that have this tower."""
_NAMES = "_model."

_POOLER = tuple(replace(row, when="tower_pooler") for row in plain.POOLER)
_PROJECTION = tuple(
    Row(f"projection.{word}", (shape,), stage="last", when="projection",
        hf=f"projection.{word}",
        core=f"projection_enc.{word}",
        legacy=f"projection_enc.{word}")
    for word, shape in (("weight", "projection hidden"), ("bias", "projection"))
)  # fmt: skip
TOWER = (*plain.EMBEDDINGS, *plain.LAYERS, *plain.FINAL_NORM, *_POOLER, *_PROJECTION)
"""The rows of one tower, with the names that they have in it."""


def _of_tower(row: Row, tower: str) -> Row:
    """The row of a tensor in a tower."""
    names = {
        key: tuple(_prefixed(spelling, key, tower) for spelling in spellings)
        for key, spellings in row.names.items()
    }
    when = f"{row.when} {TOWERS[tower]}" if row.when else TOWERS[tower]
    return replace(row, canonical=f"{tower}.{row.canonical}", names=names, when=when, copies=())


def _prefixed(spelling: Separate, key: str, tower: str) -> Separate:
    prefix = f"{tower}." if key == "hf" else tower + _NAMES
    return replace(spelling, name=prefix + spelling.name)


ROWS = tuple(_of_tower(row, tower) for tower in TOWERS for row in TOWER)


def _no_reading(raw: Raw) -> Fields:
    raise NotExpressible("a biencoder has no config.json; its Megatron checkpoint describes it")


def _no_writing(config: ModelConfig) -> Raw:
    raise NotExpressible(
        "a biencoder has no config.json of its own; --saver hf writes one for each of its towers"
    )


FAMILY = Family(
    name="biencoder",
    architectures=("BiEncoderModel",),
    model_type="biencoder",
    rows=ROWS,
    keys=(Keys((), _no_reading, _no_writing),),
    recognized="learned norm_bias !gated !encoder both_ways retriever !mixture",
    proven="names",
    reads_hf=False,
)
