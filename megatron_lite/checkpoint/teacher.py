"""Opens the teacher of a distillation."""

from formats.small_files import SmallFile
from megaconv.engine.new_tokenizer import tokenizer_files
from megaconv.engine.new_vocabulary import with_vocabulary
from megaconv.engine.token_lists import Files, kinds_of, token_list
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Source
from megaconv.options import LoadOptions
from megaconv.options.vocabulary import VocabularyChoice
from megatron_lite.checkpoint import sidecars
from megatron_lite.checkpoint.places import readable
from megatron_lite.checkpoint.restore import Start, open_language_model
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.models.purposes import check_teacher
from megatron_lite.settings.config import Settings
from megatron_lite.settings.teacher import require_tokens


def find_teacher(
    settings: Settings, student: ModelConfig, start: Start | None, tokenizer: Tokenizer
) -> Start | None:
    """Open the weights of --teacher-load with the student's tokens; None without a teacher. Raises CheckpointError.

    start: the checkpoint that the student starts from; None for random weights. tokenizer: of the run.
    """
    given = settings.distilling.teacher_load
    if given is None:
        return None
    source = open_language_model(readable(given), options=LoadOptions(optimizer=False))
    config = source.header.config
    check_teacher(config, given)
    require_tokens(config, student, given)
    _require_same_tokens(
        tokenizer_files(source.header), _own_files(settings, start, tokenizer), given
    )
    source = _with_tokens(source, student.vocab, given)
    header = source.header
    tensors = {key: tensor for key, tensor in source.tensors() if key.slot == WEIGHT}
    return Start(given, header, tensors, {}, Progress(), with_optimizer=False, files=header.files)


def _with_tokens(source: Source, tokens: int, given: str) -> Source:
    """Return the teacher without the rows of its embedding and head that the student lacks.

    Models of one family often have the same tokenizer and other numbers of unused rows. Raises UsageError for a teacher
    whose tokenizer needs more rows than the student has.
    """
    own = source.header.config.vocab
    if own == tokens:
        return source
    try:
        return with_vocabulary(source, VocabularyChoice(size=tokens), given)
    except UsageError:
        raise UsageError(
            f"--teacher-load {given}: uses some of its {own:,} tokens that the trained model lacks, which has {tokens:,}; choose a "
            "teacher with the same tokenizer"
        ) from None


def _own_files(settings: Settings, start: Start | None, tokenizer: Tokenizer) -> Files:
    """Return the files of the run's tokenizer: those that the flags name, or those beside the start."""
    named = sidecars.tokenizer_files(settings.data, tokenizer)
    if named or start is None:
        return {name: SmallFile.of(name, content) for name, content in named.items()}
    return tokenizer_files(start.header)


def _require_same_tokens(teacher: Files, student: Files, given: str) -> None:
    """Raise UsageError for a teacher whose tokenizer has other tokens. Tokenizers that aren't beside a model are not compared.

    Added tokens may differ, because tuned models rename reserved ones.
    """
    kinds = [kind for kind in kinds_of(teacher) if kind in student]
    if not kinds:
        return
    theirs, ours = (token_list(files, kinds[0]).usual for files in (teacher, student))
    for number in theirs.keys() & ours.keys():
        if theirs[number] != ours[number]:
            raise UsageError(
                f"--teacher-load {given}: has another tokenizer, in which token {number} is {theirs[number]!r:.40} and not "
                f"{ours[number]!r:.40}; choose a teacher with the tokenizer of the trained model"
            )
