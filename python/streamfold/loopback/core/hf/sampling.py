"""Samples a token from logits: penalties, temperature, top-k, top-p, min-p, a seed, and the logprobs of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from streamfold.loopback.core.causal_lm import LogprobsOf
    from streamfold.loopback.core.request_params import RequestParams

__all__ = ["Outcome", "Sampler"]

_MASK = (1 << 64) - 1


class Outcome:
    """A token that was drawn, and the distributions that it was drawn from.

    Args:
        token: its id.
        reported: logprobs of the distribution that the engine reports, float32 ``[vocab]``.
        kept: the ids that could be drawn, most probable first, int64 ``[kept]``.
        kept_logprobs: their logprobs, renormalised over them, float32 ``[kept]``.
    """

    def __init__(self, token: int, reported: torch.Tensor, kept: torch.Tensor, kept_logprobs: torch.Tensor) -> None:
        self.token: int = token
        self._reported = reported
        self._kept = kept
        self._kept_logprobs = kept_logprobs

    @property
    def logprob(self) -> float:
        """The logprob that the engine reports."""
        return float(self._reported[self.token])

    @property
    def rank(self) -> int:
        """How many ids are at least as probable, itself included."""
        return int((self._reported >= self._reported[self.token]).sum())

    @property
    def kept(self) -> list[int]:
        """The ids that could be drawn, most probable first."""
        ids: list[int] = self._kept.tolist()
        return ids

    @property
    def kept_logprob(self) -> float:
        """The logprob, renormalised over the ids that could be drawn."""
        return float(self._kept_logprobs[self._kept == self.token])

    def candidates(self, count: int) -> list[tuple[float, int]]:
        """The ``count`` most probable ids with their logprobs."""
        values, ids = self._reported.topk(min(count, len(self._reported)))
        return [*zip(values.tolist(), ids.tolist(), strict=True)]


class Sampler:
    """Samples the tokens of one request.

    Penalties are first, then temperature, then top-k, top-p and min-p side by side, as in SGLang: each of them judges
    the whole distribution. The random numbers of a token depend on the seed and on its position alone, so a sequence
    that is cut and continued from its own tokens goes on as it would have.
    """

    def __init__(
        self,
        params: RequestParams,
        *,
        stop_ids: Collection[int],
        counts_prompt: frozenset[str],
        logprobs_of: LogprobsOf,
    ) -> None:
        self._sampling = params.sampling
        self._seed = (params.seed or 0) & _MASK
        self._prompt = params.prompt
        self._forbidden = sorted(stop_ids)
        self._counts_prompt = counts_prompt
        self._logprobs_of = logprobs_of

    def sample(self, logits: torch.Tensor, output: Sequence[int]) -> Outcome:
        """Sample the token behind ``output``, the tokens generated so far, from its logits ``[vocab]``."""
        sampling = self._sampling
        logits = logits.float()
        adjusted = self._penalized(logits, output)
        if len(output) < sampling.min_new_tokens:
            adjusted = adjusted.index_fill(0, torch.tensor(self._forbidden, dtype=torch.int64), -torch.inf)
        scaled = torch.log_softmax(adjusted / (sampling.temperature or 1.0), dim=-1)
        kept = self._kept(scaled)
        kept_logprobs = torch.log_softmax(scaled[kept], dim=-1)
        token = int(kept[self._draw(kept_logprobs, kept, len(self._prompt) + len(output))])
        return Outcome(token, self._reported(logits, scaled, kept, kept_logprobs), kept, kept_logprobs)

    def _reported(
        self, logits: torch.Tensor, scaled: torch.Tensor, kept: torch.Tensor, kept_logprobs: torch.Tensor
    ) -> torch.Tensor:
        if self._logprobs_of == "raw":
            return torch.log_softmax(logits, dim=-1)
        if self._logprobs_of == "kept":
            return torch.full_like(scaled, -torch.inf).index_copy(0, kept, kept_logprobs)
        return scaled

    def _penalized(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        penalties = self._sampling.penalties
        for name, penalty in penalties.items():
            counted = [*self._prompt, *output] if name in self._counts_prompt else output
            counts = torch.bincount(torch.tensor([*counted], dtype=torch.int64), minlength=len(logits))
            if name == "repetition_penalty":
                logits = torch.where(counts > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
            elif name == "frequency_penalty":
                logits = logits - penalty * counts
            else:
                logits = logits - penalty * (counts > 0)
        return logits

    def _kept(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Return the ids that can be drawn, most probable first, int64 ``[kept]``."""
        sampling = self._sampling
        if sampling.greedy:
            return logprobs.argmax(keepdim=True)
        ordered, ids = logprobs.sort(descending=True, stable=True)
        probs = ordered.exp()
        keep = ordered > -torch.inf
        if sampling.top_p < 1:
            keep &= probs.cumsum(0) - probs <= sampling.top_p
        if sampling.min_p > 0:
            keep &= probs >= probs[0] * sampling.min_p
        if sampling.top_k > 0:
            keep[sampling.top_k :] = False
        keep[0] = True
        return ids[keep]

    def _draw(self, logprobs: torch.Tensor, ids: torch.Tensor, position: int) -> int:
        """Return the place in ``ids`` of the token that is drawn: the Gumbel-max trick, with a noise for each id."""
        if len(ids) == 1:
            return 0
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=position))
        noise = torch.from_numpy(generator.gumbel(size=int(ids.max()) + 1))
        return int((logprobs.double() + noise[ids]).argmax())
