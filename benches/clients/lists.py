"""What the Python clients make of events: lists that grow, and arrays in the end. No checks: hard to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benches.clients.base import Reading

if TYPE_CHECKING:
    from benches.clients.base import Target


class Lists:
    """The tokens of one response."""

    def __init__(self, target: Target) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        if target.engine == "vllm":
            self.add = self._add_vllm
        elif target.cumulative:
            self.add = self._replace
        else:
            self.add = self._extend

    def _extend(self, event: dict[str, Any]) -> None:
        pairs = event["meta_info"]["output_token_logprobs"]
        self.token_ids += [pair[1] for pair in pairs]
        self.logprobs += [pair[0] for pair in pairs]

    def _replace(self, event: dict[str, Any]) -> None:
        pairs = event["meta_info"]["output_token_logprobs"]
        known = len(self.token_ids)
        self.token_ids += [pair[1] for pair in pairs[known:]]
        self.logprobs += [pair[0] for pair in pairs[known:]]

    def _add_vllm(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            self.token_ids += choice["token_ids"]
            self.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]

    def reading(self) -> Reading:
        """As arrays."""
        return Reading(np.array(self.token_ids, dtype=np.int32), np.array(self.logprobs, dtype=np.float64))
