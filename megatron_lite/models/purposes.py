"""Models that can't be used for a purpose: training on pairs, on rewards or from a teacher, generation."""

from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.families.parts.whole_model import named
from megaconv.model.config import ModelConfig
from megatron_lite.models.trainable import RETRO, check_computed
from megatron_lite.settings.architecture import OF_THEIR_OWN


def refuse_whole(config: ModelConfig, place: str) -> None:
    """Raise NotExpressible for a multimodal model. place: the path it was read from."""
    if config.whole is not None:
        raise NotExpressible(
            f"{place}: {named(config.whole.config)} is a multimodal model, and only language models are supported; "
            f"convert its language model: megaconv convert {place} LANGUAGE_MODEL --saver hf --text-only"
        )


def refuse_scores(config: ModelConfig, place: str) -> None:
    """Raise NotExpressible for a model without a head for words. place: the path it was read from."""
    if is_headless(config):
        raise NotExpressible(
            f"{place}: the model has no head for words (its class is {named_class(config)}); `finetune --embedding`, `embed` and "
            "/v1/embeddings use it"
        )
    refuse_score_head(config, place)


def refuse_score_head(config: ModelConfig, place: str) -> None:
    """Raise NotExpressible for a model with a head of scores in place of one for words. place: the path it was read from."""
    if config.has("scores"):
        raise NotExpressible(
            f"{place}: the model has a head of scores, as reward models and critics have it, and no head for words; it can be trained "
            "with --reward-modeling alone"
        )


def refuse_embedding(config: ModelConfig, place: str) -> None:
    """Raise NotExpressible for a model whose last hidden states are no vectors of texts. place: the path it was read from."""
    if config.family in (*OF_THEIR_OWN, RETRO):
        raise NotExpressible(
            f"{place}: is a {config.family}; a biencoder or a decoder was expected. --embedder takes other encoders"
        )
    if config.has("scores"):
        raise NotExpressible(
            f"{place}: the model has a head of scores; vectors of texts are those of a language model"
        )
    if config.has("head_projection"):
        raise NotExpressible(
            f"{place}: a {config.family} has a matrix between its last norm and its head, with which vectors aren't computed"
        )


def is_headless(config: ModelConfig) -> bool:
    """Return whether the model has no head, as sentence-transformers stores embedding models."""
    return family(config.family).is_bare(config)


def named_class(config: ModelConfig) -> str:
    """Return the class in the model's config.json."""
    return ", ".join((config.hf or {}).get("architectures") or ())


def refuse_taught(config: ModelConfig) -> None:
    """Raise NotExpressible for a model that can't learn from a teacher."""
    if config.family == RETRO:
        raise NotExpressible("a Retro can't learn from a teacher")


def check_teacher(config: ModelConfig, place: str) -> None:
    """Raise NotExpressible for a model that can't be a teacher. place: the path it was read from."""
    refuse_encoders(config, place)
    if config.has("scores"):
        raise NotExpressible(
            f"{place}: has a head of scores and no head for words, so it can't be a teacher"
        )
    if config.family == RETRO:
        raise NotExpressible(
            f"{place}: is a Retro, which reads neighbors of its text; choose another teacher"
        )
    try:
        check_computed(config)
    except NotExpressible as error:
        raise NotExpressible(f"{place}: {error}") from None


def refuse_encoders(config: ModelConfig, place: str) -> None:
    """Raise NotExpressible for a model that can't generate text. place: the path it was read from."""
    if config.family in OF_THEIR_OWN:
        raise NotExpressible(
            f"{place}: is a {config.family}, which predicts no next token; give a decoder"
        )
