"""Completions of prompts, sampled with the weights of the moment by the engine of generation, and their rewards.

Rank 0 chooses the tokens and calls the reward functions, and all ranks compute. Then all ranks get the results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.data.harmony import begins_answer, harmony_marks
from megatron_lite.data.thinking_fields import FIELDS
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.answer import Said
from megatron_lite.inference.batching import generate
from megatron_lite.inference.harmony import HarmonyStream
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import NotFinite
from megatron_lite.models.lora.attached import constant_adapters
from megatron_lite.models.rng import mix
from megatron_lite.objectives.completions import MOST_ROWS
from megatron_lite.objectives.prompt_images import PromptImages
from megatron_lite.objectives.prompts import Prompt
from megatron_lite.objectives.rewards import Reward
from megatron_lite.parallel import comm
from megatron_lite.settings.grpo import Grpo


@dataclass(frozen=True)
class Completions:
    """Completions of prompts, group after group; equal on all ranks."""

    ids: list[list[int]]
    rewards: Tensor
    """float64 [completions, functions]."""


@dataclass(frozen=True)
class Sampler:
    """Samples completions. A token depends on the seed, the sample, the completion's number and the position."""

    engine: Engine
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    rewards: Sequence[Reward]
    grpo: Grpo
    seed: int
    images: PromptImages | None = None
    """The images of prompts; None if there are none."""

    def complete(self, prompts: Sequence[Prompt], consumed: int) -> Completions:
        """Return --num-generations completions of each prompt. Collective. consumed: number of samples before.

        Raises NotFinite, and TrainingError for a reward function that fails.
        """
        grid = self.engine.grid
        # The completions of one prompt are adjacent.
        asked: list[Prompt] = []
        requests: list[Request] = []
        for sample, prompt in enumerate(prompts, consumed):
            for generation in range(self.grpo.num_generations):
                asked.append(prompt)
                requests.append(self._request(prompt, mix(self.seed, sample, generation)))
        longest = max(len(request.prompt) for request in requests)
        rows = min(-(-len(requests) // grid.dp), MOST_ROWS)
        found: Completions | None = None
        with self.engine.whole_parameters(), constant_adapters(self.engine.chunks):
            model = EngineModel(self.engine, rows, longest + self.grpo.max_completion_length)
            if self.images is not None:
                model.images = self.images.shown(model)
            if grid.rank:
                model.follow()
            else:
                ids = self._generated(model, requests)
                with model.waiting():
                    found = Completions(ids, self._judged(asked, ids))
                model.close()
        return self._shared(found, len(requests))

    def _request(self, prompt: Prompt, seed: int) -> Request:
        sampling = Sampling(self.grpo.temperature, seed=seed)
        return Request(
            prompt.ids,
            self.grpo.max_completion_length,
            sampling,
            self.stop_ids,
            pictures=prompt.pictures,
        )

    def _generated(self, model: EngineModel, requests: Sequence[Request]) -> list[list[int]]:
        answers = generate(model, requests)
        if any(answer.end == "error" for answer in answers):
            raise NotFinite
        return [answer.tokens for answer in answers]

    def _judged(self, asked: Sequence[Prompt], ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the rewards of all functions, float64 [completions, functions]."""
        if not self.rewards:
            return torch.zeros(len(ids), 0, dtype=torch.float64)
        offered = self._offered(asked, ids)
        columns = [reward(offered, len(ids)) for reward in self.rewards]
        return torch.tensor(columns, dtype=torch.float64).t()

    def _offered(
        self, asked: Sequence[Prompt], ids: Sequence[Sequence[int]]
    ) -> Mapping[str, list[Any]]:
        """Return the arguments of reward functions by name."""
        names = dict.fromkeys(name for prompt in asked for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in asked] for name in names}
        completions: list[Any] = []
        for prompt, tokens in zip(asked, ids, strict=True):
            is_chat = not isinstance(prompt.content, str)
            completions.append(
                [self._message(prompt, tokens)] if is_chat else self.tokenizer.detokenize(tokens)
            )
        return {
            **columns,
            "prompts": [prompt.content for prompt in asked],
            "completions": completions,
            "completion_ids": [list(tokens) for tokens in ids],
        }

    def _message(self, prompt: Prompt, tokens: Sequence[int]) -> dict[str, str]:
        """Return a completion as the assistant's message. In harmony, its thinking is apart from its content."""
        marks = harmony_marks(self.tokenizer)
        if marks is None or not begins_answer(prompt.ids, marks):
            return {"role": "assistant", "content": self.tokenizer.detokenize(tokens)}
        answer = HarmonyStream(marks, self.tokenizer.detokenize, prompt.ids)
        said = Said()
        for token in tokens:
            if token not in self.stop_ids:
                said += answer.add(token)
        said += answer.finish(complete=tokens[-1] in self.stop_ids)
        thinking = {FIELDS[0]: said.thinking} if said.thinking else {}
        return {"role": "assistant", "content": said.text, **thinking}

    def _shared(self, found: Completions | None, count: int) -> Completions:
        """Return the completions of rank 0 on all ranks."""
        grid = self.engine.grid
        world = grid.group("world")
        if found is not None and world is None:
            return found
        most, device = self.grpo.max_completion_length, grid.device
        rows = torch.zeros(count, 1 + most, dtype=torch.int64)
        rewards = torch.zeros(count, len(self.rewards), dtype=torch.float64)
        if found is not None:
            rewards.copy_(found.rewards)
            for row, tokens in zip(rows, found.ids, strict=True):
                row[: 1 + len(tokens)] = torch.tensor([len(tokens), *tokens])
        rows, rewards = rows.to(device), rewards.to(device)
        comm.broadcast(rows, 0, world)
        comm.broadcast(rewards, 0, world)
        ids = [row[1 : 1 + row[0]] for row in rows.tolist()]
        return Completions(ids, rewards.cpu())
