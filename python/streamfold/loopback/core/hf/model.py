"""A causal language model of transformers that generates for several requests at once, each with a KV cache."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch

from streamfold.loopback.core.hf.cache import SequenceCache, append, join
from streamfold.loopback.core.hf.routing import Routing
from streamfold.loopback.core.hf.sampling import Sampler
from streamfold.loopback.core.hf.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    from streamfold.loopback.core.causal_lm import LogprobsOf, SequenceState
    from streamfold.loopback.core.hf.sampling import Outcome
    from streamfold.loopback.core.request_params import RequestParams

__all__ = ["HfModel", "HfSequence"]


class HfSequence:
    """A prompt and what was generated after it: see :class:`streamfold.loopback.core.causal_lm.SequenceState`.

    :meth:`HfModel.forward` runs in a thread; the other methods run in the event loop, also meanwhile.
    """

    def __init__(self, model: HfModel, params: RequestParams, sampler: Sampler) -> None:
        self.params: RequestParams = params
        self.tokens: list[int] = [*params.prompt]
        self.cache: SequenceCache | None = None
        self.closed: bool = False
        self.pending: Outcome | None = None  # computed, and not drawn yet
        self.rows: list[npt.NDArray[np.int32]] = []  # routed experts of the positions in the cache
        self.prompt_values: list[float] | None = None  # logprobs of the prompt's tokens behind the first one asked for
        self._model = model
        self._sampler = sampler
        self._last: Outcome | None = None

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.params.prompt) :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the first pass has to compute the logprobs of the prompt."""
        asked = self.params.logprobs and 0 <= self.params.logprob_start < len(self.params.prompt)
        return asked and self.prompt_values is None

    def sample(self, logits: torch.Tensor) -> None:
        """Compute the next token from its logits ``[vocab]``."""
        self.pending = self._sampler.sample(logits, self.output)

    def draw(self) -> int:
        """Draw the next token and append it; compute it first if the batch has not."""
        if self.pending is None:
            self._model.forward([self])
        outcome, self.pending = self.pending, None
        if outcome is None:
            msg = "the sequence was released"
            raise RuntimeError(msg)
        self._last = outcome
        self.tokens.append(outcome.token)
        return outcome.token

    @property
    def logprob(self) -> float:
        """The logprob that the engine reports."""
        return self._drawn.logprob

    @property
    def rank(self) -> int:
        """The place of the token among all ids, by probability."""
        return self._drawn.rank

    @property
    def kept(self) -> list[int]:
        """The ids that could have been drawn, most probable first."""
        return self._drawn.kept

    @property
    def kept_logprob(self) -> float:
        """The logprob, renormalised over the ids that could have been drawn."""
        return self._drawn.kept_logprob

    def candidates(self, count: int) -> list[tuple[float, int]]:
        """The ``count`` most probable ids with their logprobs."""
        return self._drawn.candidates(count)

    def prompt_logprobs(self, start: int) -> list[tuple[float | None, int]] | None:
        """The prompt's tokens from ``start`` on with their logprobs; None before the first pass."""
        if self.prompt_values is None:
            return None
        return [*zip([None, *self.prompt_values], self.params.prompt[start:], strict=True)]

    def experts(self, start: int, output: Sequence[int]) -> npt.NDArray[np.int32]:
        """The experts of the positions from ``start`` to the last but one, int32 ``[positions, layers, top_k]``."""
        end = len(self.params.prompt) + len(output) - 1
        if not self.rows:
            return np.zeros((0, *self._model.experts_shape), np.int32)
        return np.concatenate(self.rows)[start:end]

    def retract(self) -> None:
        """Drop the KV cache and the routed experts; both are computed anew."""
        self.cache = self.pending = None
        self.rows = []

    def release(self) -> None:
        """Drop the KV cache for good."""
        self.closed = True
        self.cache = self.pending = None

    @property
    def _drawn(self) -> Outcome:
        if self._last is None:
            msg = "no token was drawn yet"
            raise RuntimeError(msg)
        return self._last


class HfModel:
    """A model in evaluation mode; see :class:`streamfold.loopback.core.causal_lm.CausalLM`.

    Args:
        network: transformers' model.
        batch_invariant: compute each sequence alone. Otherwise those that decode are padded to one batch, where the
            model's layers allow it.
    """

    blocking: bool = True

    def __init__(self, network: Any, *, batch_invariant: bool = False) -> None:  # noqa: ANN401  # untyped here
        self._network = network.eval().requires_grad_(False)  # noqa: FBT003  # torch's signature
        self._batch_invariant = batch_invariant
        self._routing = Routing(network)
        self._weights = Weights(network)
        self._sequences: WeakSet[HfSequence] = WeakSet()
        self._inputs = inspect.signature(network.forward).parameters
        # What it is called differs between releases of transformers.
        found = [name for name in ("cache", "past_key_values") if name in self._inputs]
        if not found:
            msg = f"{type(network).__name__} takes no cache of transformers: it cannot be run here"
            raise ValueError(msg)
        self._cache_name: str = found[0]

    @property
    def experts_shape(self) -> tuple[int, int]:
        """Layers and experts per token of a row of routed experts."""
        return self._routing.num_layers, self._routing.top_k

    def start(
        self,
        params: RequestParams,
        *,
        stop_ids: Collection[int] = (),
        counts_prompt: frozenset[str] = frozenset(),
        logprobs_of: LogprobsOf = "scaled",
    ) -> HfSequence:
        """Return a sequence without generated tokens."""
        sampler = Sampler(params, stop_ids=stop_ids, counts_prompt=counts_prompt, logprobs_of=logprobs_of)
        sequence = HfSequence(self, params, sampler)
        self._sequences.add(sequence)
        return sequence

    def forward(self, sequences: Sequence[SequenceState]) -> None:
        """Compute the next token of each sequence; prompts one by one, the others as one batch."""
        decoding: list[tuple[HfSequence, SequenceCache]] = []
        with torch.inference_mode():
            for sequence in sequences:
                if not isinstance(sequence, HfSequence) or sequence.closed or sequence.pending is not None:
                    continue
                cache = sequence.cache  # it may be dropped meanwhile
                if cache is None:
                    cache = sequence.cache = SequenceCache(self._network.config)
                    self._run_alone(sequence, cache)
                elif self._batch_invariant or not cache.can_join:
                    self._run_alone(sequence, cache)
                else:
                    decoding.append((sequence, cache))
            if len(decoding) == 1:
                self._run_alone(*decoding[0])
            elif decoding:
                self._run_batch(decoding)

    def _run_alone(self, sequence: HfSequence, cache: SequenceCache) -> None:
        ids = sequence.tokens[cache.length :]
        start = sequence.params.logprob_start if sequence.wants_prompt_logprobs else None
        logits = self._run([ids], cache.layers, keep=1 if start is None else 0)[0]
        cache.length += len(ids)
        if start is not None:
            rest = sequence.params.prompt[start + 1 :]
            shown = torch.log_softmax(logits[start : start + len(rest)].float(), dim=-1)
            sequence.prompt_values = shown.gather(1, torch.tensor(rest, dtype=torch.int64)[:, None])[:, 0].tolist()
        self._note(sequence, cache, logits[-1], self._routing.take(1, len(ids))[0])

    def _run_batch(self, decoding: Sequence[tuple[HfSequence, SequenceCache]]) -> None:
        sequences, caches = zip(*decoding, strict=True)
        joined, present = join(caches)
        lengths = present.sum(1, keepdim=True)
        mask = torch.cat([present, present.new_ones(len(caches), 1)], dim=1)
        ids = [sequence.tokens[-1:] for sequence in sequences]
        logits = self._run(ids, joined, keep=1, attention_mask=mask.long(), position_ids=lengths)
        append(joined, caches)
        rows = self._routing.take(len(caches), 1)
        for i, sequence in enumerate(sequences):
            self._note(sequence, caches[i], logits[i, -1], rows[i])

    def _run(self, ids: list[list[int]], cache: Any, *, keep: int, **inputs: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # untyped here
        """Run the network; return the logits of the last ``keep`` positions (0: of all), ``[batch, keep, vocab]``."""
        given = {"input_ids": torch.tensor(ids), "use_cache": True, "logits_to_keep": keep, **inputs}
        # Some models need no positions, and some compute all logits.
        known = {name: value for name, value in given.items() if name in self._inputs}
        logits: torch.Tensor = self._network(**known, **{self._cache_name: cache}).logits
        return logits

    @staticmethod
    def _note(sequence: HfSequence, cache: SequenceCache, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Note what a pass has computed, unless the sequence was retracted or released meanwhile."""
        if sequence.closed:
            sequence.release()
        elif sequence.cache is cache:
            if sequence.params.experts:
                sequence.rows.append(rows.numpy().copy())
            sequence.sample(logits)

    def used_tokens(self, sequences: Sequence[SequenceState]) -> int:  # noqa: ARG002  # it knows what it holds
        """The tokens in the KV caches of all sequences."""
        caches = [sequence.cache for sequence in self._sequences]
        return sum(cache.length for cache in caches if cache is not None)

    def load_weights(self, path: str) -> None:
        """Replace all weights by those of a directory. Raises WeightsError or OSError."""
        self._weights.load_directory(path)

    def load_bucket(self, data: bytes) -> None:
        """Replace the weights that a bucket holds. Raises WeightsError."""
        self._weights.load_bucket(data)
