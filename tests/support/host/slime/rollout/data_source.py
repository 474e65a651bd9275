"""Where prompts come from and partial groups go back to."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.host.slime.utils.misc import load_function
from support.host.slime.utils.types import Sample

if TYPE_CHECKING:
    from types import SimpleNamespace

_STATE = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")


class Dataset:
    """Prompts in an order that a seed and the epoch decide."""

    def __init__(self, prompts: list[Sample], seed: int) -> None:
        self.origin_samples = self.samples = prompts
        self._seed = seed
        self._epoch_id = -1

    def shuffle(self, epoch_id: int) -> None:
        if epoch_id != self._epoch_id:
            self.samples = list(self.origin_samples)
            random.Random(self._seed + epoch_id).shuffle(self.samples)
            self._epoch_id = epoch_id

    def __len__(self) -> int:
        return len(self.samples)


class RolloutDataSource:
    """Serves ``args.prompt_data``, strings or samples, over and over; knows its place in the file that it saves."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset: Dataset | None = None
        if args.rollout_global_dataset:
            prompts = [prompt if isinstance(prompt, Sample) else Sample(prompt=prompt) for prompt in args.prompt_data]
            self.dataset = Dataset(prompts, args.rollout_seed)
            if args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return ``num_samples`` new groups; there is no end."""
        return [self._new_group() for _ in range(num_samples)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        msg = "it can only be read"
        raise RuntimeError(msg)

    def save(self, rollout_id: int) -> None:
        if self.args.rollout_global_dataset:
            path = self._path(self.args.save, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({name: getattr(self, name) for name in _STATE}), encoding="utf-8")

    def load(self, rollout_id: int | None = None) -> None:
        """Resume from what was saved; from the first prompt if nothing was."""
        if not self.args.rollout_global_dataset or self.args.load is None:
            return
        path = self._path(self.args.load, rollout_id)
        if not path.exists():
            return
        vars(self).update(json.loads(path.read_text(encoding="utf-8")))
        if self.args.rollout_shuffle and self.dataset is not None:
            self.dataset.shuffle(self.epoch_id)

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    @staticmethod
    def _path(folder: str, rollout_id: int | None) -> Path:
        return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"

    def _new_group(self) -> list[Sample]:
        if self.dataset is None:
            prompt = Sample()
        else:
            if self.sample_offset == len(self.dataset):
                self.sample_offset = 0
                self.epoch_id += 1
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            prompt = self.dataset.samples[self.sample_offset]
            self.sample_offset += 1
        group = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Serves the buffer first, which a filter may choose from. No file holds the buffer."""

    def __init__(self, args: SimpleNamespace) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self.buffer_filter = pop_first if args.buffer_filter_path is None else load_function(args.buffer_filter_path)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = []
        if self.buffer and num_samples:
            groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        missing = num_samples - len(groups)
        if missing and self.dataset is None:
            msg = f"{missing} groups are missing"
            raise RuntimeError(msg)
        return groups + super().get_samples(missing)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back."""
        for group in samples:
            if len(group) != self.args.n_samples_per_prompt:
                msg = f"a group has {self.args.n_samples_per_prompt} samples, not {len(group)}"
                raise ValueError(msg)
        self.buffer += samples

    def get_buffer_length(self) -> int:
        return len(self.buffer)


def pop_first(
    args: SimpleNamespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Remove ``num_samples`` groups from ``buffer`` and return them, as every buffer filter does."""
    chosen = buffer[:num_samples]
    del buffer[:num_samples]
    return chosen
