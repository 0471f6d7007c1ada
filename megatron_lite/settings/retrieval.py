"""Settings of retrievers. They have the form of the settings in config.py. The towers' settings are in model.py."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Retrieval:
    """Retrievers: --model-type biencoder, trained on blocks with titles or on questions with passages"""

    bert_load: str | None = flag(
        None,
        "BERT whose layers both towers start with, if --load is missing or holds no checkpoint: any that megaconv reads",
        remote=True,
    )
    titles_data_path: tuple[str, ...] | None = flag(
        None,
        "indexed data sets of titles, one for each data set of sentences",
        samples=True,
    )
    query_in_block_prob: float = flag(
        0.1, "probability that a query's sentence stays in its block", samples=True
    )
    use_one_sent_docs: bool = flag(False, "use documents and blocks of one sentence", samples=True)
    retriever_score_scaling: bool = flag(
        False, "divide scores by the square root of --hidden-size", samples=True
    )
    retriever_report_topk_accuracies: tuple[int, ...] | None = flag(
        None, "report how often a query's own context is among the k best, for each of these k"
    )
    retriever_negatives: str = flag(
        "batch",
        "texts that a query is compared with: of the whole global batch, or of one micro batch of all data-parallel ranks",
        choices=("batch", "microbatch"),
        samples=True,
    )
    retriever_seq_length: int = flag(
        256, "tokens of a question or passage of --task RET-FINETUNE-NQ", samples=True
    )
    train_with_neg: bool = flag(
        False, "train with the negative passages of each question", samples=True
    )
    train_hard_neg: int = flag(
        0, "negative passages of each question in training, hard ones first", samples=True
    )
    val_av_rank_hard_neg: int = flag(30, "hard negative passages of each question in evaluations")
    val_av_rank_other_neg: int = flag(30, "other negative passages of each question in evaluations")
