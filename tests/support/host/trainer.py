"""A trainer that resumes from its last checkpoint, and may kill itself; a script whose argument is a Plan as JSON.

Its log has a line for what each rollout gave, for each state that was saved, and at the end for all that waits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from streamfold import slime
from streamfold.loopback import Config
from support.host.arguments import arguments
from support.host.install import installed
from support.host.slime.rollout.data_source import RolloutDataSource

_fsync = os.fsync


@dataclass
class Plan:
    """``dies``: ``[what, n]``, at the n-th reward, or the n-th time that our file or slime's is to be written.

    ``pooled``: fully asynchronous. ``ahead``: the next rollout is done before the last one is saved.
    """

    folder: str
    url: str
    vocabulary: int
    rounds: int
    pooled: bool = False
    ahead: bool = False
    dies: list[Any] | None = None

    def __post_init__(self) -> None:
        self._what, self._left = self.dies or [None, 0]

    def at(self, what: str) -> None:
        """Kill this process if the plan says so."""
        if what == self._what:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


def note(folder: str, **entry: Any) -> None:
    """Write a line that survives a kill."""
    with (Path(folder) / "log").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        _fsync(file.fileno())


def entries(folder: str | Path) -> list[dict[str, Any]]:
    path = Path(folder) / "log"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def indices(groups: list[list[Any]]) -> list[int]:
    return [group[0].group_index for group in groups]


def train(plan: Plan) -> None:
    async def reward(args: Any, sample: Any) -> float:
        plan.at("reward")
        return float(sample.response_length)

    def fsync(fd: Any) -> None:
        plan.at("ours")
        _fsync(fd)

    def save_slimes(self: RolloutDataSource, rollout_id: int) -> None:
        plan.at("slime's")
        save(self, rollout_id)

    save, RolloutDataSource.save = RolloutDataSource.save, save_slimes  # type: ignore[method-assign]
    os.fsync = fsync
    args = arguments(
        plan.url, Config(vocab_size=plan.vocabulary),
        save=plan.folder, load=plan.folder, custom_rm_path=reward, partial_rollout=True, rollout_shuffle=True,
        rollout_batch_size=3, over_sampling_batch_size=5, rollout_max_response_len=60, streamfold_in_flight=5,
        prompt_data=[f" {word} story" for word in ("the", "of", "and", "to", "in", "is", "that")],
    )  # fmt: skip
    source = slime.DataSource(args)
    start = max([entry["saved"] + 1 for entry in entries(plan.folder) if "saved" in entry], default=0)
    source.load(start - 1)
    give = slime.generate_rollout_async if plan.pooled else slime.generate_rollout
    print("ready", flush=True)
    upcoming: Any = None
    for rollout_id in range(start, plan.rounds):
        groups = upcoming or give(args, rollout_id, source).samples
        upcoming = give(args, rollout_id + 1, source).samples if plan.ahead and rollout_id + 1 < plan.rounds else None
        note(plan.folder, rollout=rollout_id, given=indices(groups))
        source.save(rollout_id)
        note(plan.folder, saved=rollout_id)
    slime.close_rollout()
    position = source.buffer.position
    note(plan.folder, waiting=indices(source.buffer.take(len(source.buffer))), position=position)


if __name__ == "__main__":
    with installed():
        train(Plan(**json.loads(sys.argv[1])))
