"""Decoders with a head of scores instead of one for words: reward models, critics and classifiers.

    XForSequenceClassification   score.weight [labels, hidden]                        the scores of a text's last token
    XForTokenClassification      score.weight [labels, hidden], score.bias [labels]   the scores of each token

In Megatron the head is a plain linear layer in the place of GPTModel's output layer. It gives the scores of each token.
Every tensor-parallel rank of the last stage holds it whole:

    output_layer.weight [labels, hidden], output_layer.bias [labels]

Source: GenericForSequenceClassification and GenericForTokenClassification of transformers 5.24; LinearForLastLayer of
verl (b178a3cd56f5) and slime (624b824a898a), OutputLayerLinear of mcore-bridge (f020e479a20b), which ms-swift trains.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from formats.tensor import LazyTensor
from formats.wording import counted
from megaconv.errors import CorruptCheckpoint, NotExpressible, TensorMismatch, UsageError
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Raw, need_size
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.meaning import OF_WORDS
from megaconv.model.table import Row

SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"

_BOTH = """
    arcee:Arcee axk1:AXK1 axk2:AXK2 deepseek_v3:DeepseekV3 diffllama:DiffLlama exaone4:Exaone4 gemma:Gemma gemma2:Gemma2
    glm:Glm glm4:Glm4 gpt_oss:GptOss helium:Helium llama:Llama minimax:MiniMax ministral:Ministral ministral3:Ministral3
    mistral:Mistral mistral4:Mistral4 mixtral:Mixtral nemotron:Nemotron persimmon:Persimmon phi:Phi phi3:Phi3
    qwen2:Qwen2 qwen2_moe:Qwen2Moe qwen3:Qwen3 qwen3_moe:Qwen3Moe qwen3_next:Qwen3Next seed_oss:SeedOss smollm3:SmolLM3
    stablelm:StableLm starcoder2:Starcoder2
"""
_SEQUENCE = """
    biogpt:BioGpt bloom:Bloom cohere_compass_text:CohereCompassText deepseek_v2:DeepseekV2 doge:Doge falcon:Falcon
    gemma3_text:Gemma3Text gpt2:GPT2 gpt_bigcode:GPTBigCode gpt_neo:GPTNeo gpt_neox:GPTNeoX gptj:GPTJ
    hunyuan_v1_dense:HunYuanDenseV1 hunyuan_v1_moe:HunYuanMoEV1 jamba:Jamba jetmoe:JetMoe minicpm3:MiniCPM3 mpt:Mpt
    olmo:Olmo olmo2:Olmo2 olmo3:Olmo3 openai_gpt:OpenAIGPT opt:OPT phimoe:Phimoe qwen3_5:Qwen3_5Text zamba:Zamba zamba2:Zamba2
"""
_TOKEN = "apertus:Apertus beam:Beam"


def _classes() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for listed, kinds in ((_BOTH, (SEQUENCE, TOKEN)), (_SEQUENCE, (SEQUENCE,)), (_TOKEN, (TOKEN,))):
        for entry in listed.split():
            family, _, stem = entry.partition(":")
            found |= {(family, kind): stem + kind for kind in kinds}
    return found


CLASSES: Mapping[tuple[str, str], str] = _classes()
"""(family, SEQUENCE or TOKEN) -> the class of transformers, whose head is named `score`."""

SCORES = (
    Row("score.weight", ("labels hidden",), stage="last", when="scores", hf="score.weight", core="output_layer.weight"),
    Row("score.bias", ("labels",), stage="last", when="score_bias", hf="score.bias", core="output_layer.bias"),
)  # fmt: skip
"""The rows of the head."""
HEAD = "head"
HEADS = {"sequence": False, "token": True}
"""The option of savers for the kind of class, and its values -> whether the scores of all tokens are meant."""
HEAD_OPTION = {
    HEAD: f"of a reward model or critic: the class in config.json, `sequence` ({SEQUENCE}) or `token` ({TOKEN}); default: the source's "
    "class, else the one that has a bias exactly if the head has one: `token`"
}
_LABELS = ("id2label", "label2id", "num_labels")
"""The keys of a config.json that number and name labels."""
_UNASKED = 2
"""transformers' number of labels for a config.json that doesn't give it."""
NOT_OF_KEYS = ("head.labels", "head.labels_bias", "tie_embeddings", *OF_WORDS)
"""Fields that a family's own keys don't give for such a model: it has no head for words, which could be tied."""


def with_scores(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a family, with those of a head of scores if it is a decoder."""
    names = {row.canonical for row in rows}
    is_decoder = "head.weight" in names and not any(
        row.stage in ("encoder", "retriever") or row.canonical.startswith("pooler") for row in rows
    )
    return (*rows, *SCORES) if is_decoder and "score.weight" not in names else rows


def classes_with_scores(family: str) -> tuple[str, ...]:
    """The classes of transformers for a family's models with a head of scores."""
    return tuple(CLASSES[family, kind] for kind in (SEQUENCE, TOKEN) if (family, kind) in CLASSES)


def read_scores(family: str, raw: Raw) -> Fields:
    """The fields of a head of scores in a config.json; empty for a model with a head for words."""
    named = raw.get("architectures") or ()
    for kind in (SEQUENCE, TOKEN):
        if CLASSES.get((family, kind)) in named:
            of_tokens = kind == TOKEN
            return {
                "head.labels": label_count(raw),
                "head.labels_bias": of_tokens,
                "head.of_tokens": of_tokens,
                "tie_embeddings": False,
            }
    return {}


def class_inside(raw: Raw, family: str, of_words: str) -> dict[str, Any]:
    """The keys of the language model's config.json for its class, inside a multimodal model.

    raw: the multimodal model's config.json. of_words: the class of a language model with a head for words.
    """
    named = list(map(str, raw.get("architectures") or ()))
    for kind in (SEQUENCE, TOKEN):
        if (family, kind) in CLASSES and any(name.endswith(kind) for name in named):
            labels = {key: raw[key] for key in _LABELS if key in raw}
            return {"architectures": [CLASSES[family, kind]], **labels}
    return {"architectures": [of_words]}


def class_around(original: Raw, config: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json for the class with a head of scores that an original becomes.

    original: its config.json. config: the model, or the language model inside. A multimodal model's class may not be one of
    transformers: vLLM and ms-swift know it by this name.
    """
    kind = TOKEN if config.head.of_tokens else SEQUENCE
    names = [
        re.sub(r"For[A-Z]\w*$", "", str(name)) + kind
        for name in original.get("architectures") or ()
    ]
    written = written_scores(config)
    if "vision_config" in original and names:
        written["architectures"] = names
    return written | {key: value for key, value in (config.hf or {}).items() if key in _LABELS}


def label_count(raw: Raw) -> int:
    """The number of labels, as transformers counts them. Raises CorruptCheckpoint for keys that contradict each other."""
    names = raw.get("id2label")
    if names is None:
        return need_size(raw, "num_labels", _UNASKED)
    if not isinstance(names, Mapping) or not names:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: id2label should have a name for each class, found {names!r:.100}"
        )
    if len(set(map(_label_number, names))) < len(names):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: id2label has two names for one class, found the keys {list(names)!r:.100}"
        )
    stated = need_size(raw, "num_labels", len(names))
    if stated != len(names):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: num_labels is {stated}, id2label has {counted(len(names), 'name')}; remove num_labels or correct one of both"
        )
    return len(names)


def _label_number(key: str) -> int:
    """The number of a class. Raises CorruptCheckpoint for a key of id2label that isn't a number."""
    try:
        return int(key)
    except ValueError:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: the keys of id2label should be the numbers of the classes, found {key!r:.60}; write "
            '{"0": "first name", "1": "second name"}'
        ) from None


def label_names(count: int) -> dict[str, Any]:
    """transformers' names of unnamed labels, as keys of a config.json."""
    names = {str(number): f"LABEL_{number}" for number in range(count)}
    return {
        "id2label": names,
        "label2id": {name: int(number) for number, name in names.items()},
    }


def written_scores(config: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json for a head of scores. Raises NotExpressible if transformers has no class for it."""
    return {"architectures": [class_with_scores(config)], **label_names(config.head.labels)}


def class_with_scores(config: ModelConfig) -> str:
    """The class of a model with a head of scores. Raises NotExpressible if transformers has none that computes it."""
    kind = TOKEN if config.head.of_tokens else SEQUENCE
    found = CLASSES.get((config.family, kind))
    if found is None:
        others = " or ".join(classes_with_scores(config.family)) or "none for scores"
        raise NotExpressible(
            f"the model's head gives scores (head.labels = {config.head.labels}), and transformers has no {kind} with a head `score` for "
            f"the family {config.family} (it has {others}); choose --saver core"
        )
    if config.head.labels_bias and kind == SEQUENCE:
        raise NotExpressible(
            f"the head of the model has a bias, and {found} has none; --option {HEAD}=token writes a {TOKEN}"
        )
    return found


def with_asked_class(config: ModelConfig, asked: str | None) -> ModelConfig:
    """The configuration with the kind of class that --option head asks for; None: as it is. Raises UsageError."""
    if asked is None:
        return config
    if asked not in HEADS:
        raise UsageError(f"--option {HEAD}={asked}: is not known; choose {' or '.join(HEADS)}")
    if not config.head.labels:
        raise UsageError(f"--option {HEAD}: the model has a head for words; leave it out")
    return changed(config, {"head.of_tokens": HEADS[asked]})


def require_scores_of_class(
    config: ModelConfig, tensors: Mapping[str, LazyTensor], where: str
) -> None:
    """Raise TensorMismatch if files hold another head of scores than the class in config.json has.

    tensors: all in the files, by name. where: the files, for messages.
    """
    head = tensors.get("score.weight")
    classes = classes_with_scores(config.family)
    if head is None or not classes:
        return
    if not config.head.labels:
        raise TensorMismatch(
            f"{where}: holds a head of scores (score.weight), which the class in {CONFIG_NAME} doesn't have; "
            f"correct its architectures: {' or '.join(classes)}",
            code="unknown-tensor",
        )
    if len(head.shape) == 2 and head.shape[0] != config.head.labels:
        raise TensorMismatch(
            f"{where}: score.weight has {counted(head.shape[0], 'row')}, and {CONFIG_NAME} describes "
            f"{counted(config.head.labels, 'label')}; give a name for each row in id2label",
            code="misshapen-tensor",
        )


def with_stored_bias(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The configuration of a model whose files show whether the head has a bias. names: of all tensors."""
    if not config.head.labels:
        return config
    return changed(config, {"head.labels_bias": "score.bias" in names})
