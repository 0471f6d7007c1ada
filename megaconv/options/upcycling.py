"""The experts of an output that is made from a dense model (upcycling, arXiv 2212.05055)."""

from dataclasses import dataclass

from megaconv.errors import UsageError
from megaconv.model.ceilings import EXPERTS
from megaconv.options.option import INPUT_AND_OUTPUT, VALUES, Range, normalize, option

_COMMANDS = ("convert",)


@dataclass(frozen=True)
class Upcycling:
    """The experts that each MLP of a dense model becomes."""

    experts: int | None = option(
        None,
        "--num-experts",
        heading=VALUES,
        commands=_COMMANDS,
        range=Range(2, EXPERTS),
        help="Make a mixture of a dense model: each MLP becomes this number of experts, with a new router.",
    )
    """Experts of a layer; None for a model that stays as it is."""
    per_token: int | None = option(
        None,
        "--moe-router-topk",
        heading=VALUES,
        commands=_COMMANDS,
        range=Range(1, EXPERTS),
        help="Experts of a token, with --num-experts; 2 by default, or 2 times the granularity.",
    )
    granularity: int = option(
        1,
        "--moe-upcycling-granularity",
        heading=VALUES,
        commands=_COMMANDS,
        range=Range(1, EXPERTS),
        help="Cut each MLP into this number of equal parts, with --num-experts. Each expert is a part.",
    )
    """The number of parts of an MLP; 1: each expert is a whole MLP."""
    experts_of: tuple[str, ...] = option(
        (),
        "--experts-of",
        heading=INPUT_AND_OUTPUT,
        commands=_COMMANDS,
        words=list[str] | None,
        read=lambda words: tuple(map(str, words)),
        metavar="MODEL",
        help="A model whose MLPs become experts, with --num-experts; may be repeated. The experts are of these models in turn.",
    )
    """Models of any format; empty: the experts are the input's own."""

    def __post_init__(self) -> None:
        normalize(self)
        if self.experts is None:
            self._refuse_without_experts()
            return
        for number, what in ((self.experts, "--num-experts"), (self.topk, "--moe-router-topk")):
            if number % self.granularity:
                raise UsageError(
                    f"{what} {number}: expected a multiple of --moe-upcycling-granularity {self.granularity}"
                )
        if self.topk > self.experts:
            given = "" if self.per_token is not None else " by default"
            raise UsageError(
                f"--num-experts {self.experts}: a token has {self.topk} experts{given} (--moe-router-topk); expected at most as many "
                "as there are"
            )
        needed = len(self.experts_of) * self.granularity
        if needed > self.experts:
            raise UsageError(
                f"--experts-of: {len(self.experts_of)} models are {needed} experts; expected --num-experts {needed} or more"
            )

    def _refuse_without_experts(self) -> None:
        given = {
            "--moe-router-topk": self.per_token is not None,
            "--moe-upcycling-granularity": self.granularity > 1,
            "--experts-of": bool(self.experts_of),
        }
        for name, is_given in given.items():
            if is_given:
                raise UsageError(f"{name}: has no effect without --num-experts; leave it out")

    @property
    def topk(self) -> int:
        """Experts of a token."""
        return 2 * self.granularity if self.per_token is None else self.per_token
