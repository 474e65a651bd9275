"""Where prompts come from and partial groups go back to."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

from host.slime.utils.types import Sample

if TYPE_CHECKING:
    from types import SimpleNamespace


class RolloutDataSourceWithBuffer:
    """Serves the buffer first, then ``args.prompt_data``, strings or samples, over and over."""

    def __init__(self, args: SimpleNamespace) -> None:
        self._args = args
        prompts = [prompt if isinstance(prompt, Sample) else Sample(prompt=prompt) for prompt in args.prompt_data]
        self._prompts = itertools.cycle(prompts)
        self._group_indices = itertools.count()
        self._indices = itertools.count()
        self.buffer: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Give so many groups."""
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        return groups + [self._new_group() for _ in range(num_samples - len(groups))]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back."""
        for group in samples:
            if len(group) != self._args.n_samples_per_prompt:
                msg = f"a group has {self._args.n_samples_per_prompt} samples, not {len(group)}"
                raise ValueError(msg)
        self.buffer += samples

    def _new_group(self) -> list[Sample]:
        prompt, group_index = next(self._prompts), next(self._group_indices)
        group = [copy.deepcopy(prompt) for _ in range(self._args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = group_index, next(self._indices)
        return group
