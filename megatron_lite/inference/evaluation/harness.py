"""Adapter to lm-eval, to run its tasks in any layout; the only file that imports lm-eval.

lm-eval runs in one process, rank 0. The other ranks follow rank 0.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megaconv.errors import UsageError
from megaconv.extras import install
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.batching import RunningBatch, steps
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import NotFinite, require_finite
from megatron_lite.inference.text import TextStream

if TYPE_CHECKING:
    TemplateLM = Any
else:
    if find_spec("lm_eval") is None:
        raise UsageError(f"tasks of lm-eval need the package lm_eval; {install('evaluate')}")
    from lm_eval.api.model import TemplateLM

MAX_GENERATED = 256
"""Tokens of an answer if a task gives no number."""
_ROWS = 64


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model for lm-eval with the same answers as lm-eval's `hf` model with the same weights."""

    def __init__(self, opened: Opened) -> None:
        """Raises UsageError for a tokenizer that is not transformers'."""
        super().__init__()
        if not isinstance(opened.tokenizer, HuggingFaceTokenizer):
            raise UsageError(
                "tasks of lm-eval need a tokenizer of transformers: --tokenizer-type HuggingFaceTokenizer"
            )
        self.opened, self.tokenizer = opened, opened.tokenizer.inner
        self.max_length: int = opened.model.length

    @property
    def eot_token_id(self) -> int:
        found: int = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        found: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if found is None else found

    @property
    def max_gen_toks(self) -> int:
        return MAX_GENERATED

    @property
    def tokenizer_name(self) -> str:
        return self.opened.path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        begins = string.startswith(self.tokenizer.decode(self.prefix_token_id))
        special = not begins if add_special_tokens is None else add_special_tokens
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=special)
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **others: Any,
    ) -> list[tuple[float, bool]]:
        """Return (sum of the continuation's log-probabilities, True if it is the likeliest) for each request.

        Long rows are truncated at the start.
        """
        longest = self.max_length + 1
        found = []
        for first in range(0, len(requests), _ROWS):
            part = requests[first : first + _ROWS]
            rows = [[*context, *continuation][-longest:] for _, context, continuation in part]
            scores = self.opened.model.score(rows)
            for request, row, scored in zip(part, rows, scores, strict=True):
                require_finite(scored)
                _, _, continuation = request
                predicted = len(row) - 1
                first_counted = max(predicted - len(continuation), 0)
                total = scored.log_probs[first_counted:].double().sum()
                likeliest = scored.greedy[first_counted:].all()
                found.append((float(total), bool(likeliest)))
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        sums = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            scored = self._loglikelihood_tokens(
                [(None, *make_disjoint_window(window)) for window in windows]
            )
            sums.append(sum(found for found, _ in scored))
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate all answers in one running batch."""
        opened, batch = self.opened, RunningBatch(self.opened.model)
        texts: dict[int, tuple[TextStream, list[str]]] = {}
        for request in requests:
            context, settings = request.args
            wanted = _Settings(settings)
            ids = self.tok_encode(context)[-(self.max_length - wanted.max_tokens) :]
            stream = TextStream(opened.tokenizer.detokenize, wanted.until)
            stops = frozenset([*opened.stop_ids, self.eot_token_id])
            texts[batch.add(Request(tuple(ids), wanted.max_tokens, wanted.sampling, stops))] = (
                stream,
                [],
            )
        for step in steps(batch):
            if step.end == "error":
                raise NotFinite
            stream, pieces = texts[step.number]
            if step.end != "stop":
                pieces.append(stream.add(step.token))
            if stream.stopped:
                batch.cancel(step.number)
        return ["".join([*pieces, stream.finish()]) for stream, pieces in texts.values()]


class _Settings:
    """A task's generation settings. Raises UsageError for an unsupported setting: ignoring it would falsify the result."""

    def __init__(self, given: dict[str, Any]) -> None:
        words = dict(given)
        until = words.pop("until", [])
        self.until: list[str] = [until] if isinstance(until, str) else list(until)
        names = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
        lengths = [words.pop(name, None) for name in names]
        stated = [int(length) for length in lengths if length is not None]
        self.max_tokens: int = stated[0] if stated else MAX_GENERATED
        temperature = float(words.pop("temperature", 0.0) or 0.0)
        samples = words.pop("do_sample", temperature > 0)
        top_k = words.pop("top_k", 0) or 0
        top_p = words.pop("top_p", 1.0) or 1.0
        penalty = words.pop("repetition_penalty", 1.0)
        seed = words.pop("seed", 0)
        if not samples:
            temperature = 0.0
        elif not temperature:
            temperature = 1.0
        self.sampling = Sampling(temperature, int(top_k), float(top_p), float(penalty), int(seed))
        if words:
            raise UsageError(
                f"the task wants to generate with {', '.join(words)}, for which there is no code"
            )


def evaluate(
    opened: Opened,
    tasks: list[str],
    include_path: str | None,
    num_fewshot: int | None,
    limit: float | None,
    *,
    chat: bool,
) -> dict[str, Any]:
    """Return lm-eval's results by task. Raises UsageError for an unknown task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise UsageError(
            f"lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` lists them, --include-path adds others"
        )
    found = simple_evaluate(
        model=HarnessModel(opened), tasks=tasks, task_manager=manager, num_fewshot=num_fewshot, limit=limit,
        apply_chat_template=chat, bootstrap_iters=0,
    )  # fmt: skip
    results: dict[str, Any] = found["results"]
    return results
