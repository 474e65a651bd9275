"""The trainer with ``rollout_data_transport="straw"``: worker processes lease groups, generate them, and report them.

A worker has an event loop, state and generate function of its own. It asks the queue for one group at a time. What an
abort leaves of a group is written to disk and read back into the same samples; if the worker dies, another one gets the
group as it was written last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamfold.loopback import Config
from support.host import arguments, installed
from support.host.slime.rollout.sglang_rollout import POLL_SECONDS, GenerateState, generate_and_rm_group
from support.host.slime.utils.async_utils import run
from support.host.slime.utils.types import Sample
from support.paths import TESTS

if TYPE_CHECKING:
    from typing_extensions import Self

    Group = list[Sample]


@dataclass
class Plan:
    """What a worker is told: how many groups it generates at once, and the trainer's options besides the address."""

    host: str
    url: str
    vocabulary: int
    folder: str
    slots: int
    options: dict[str, Any]


class LeaseQueue:
    """Gives each group to one worker at a time, until its result is there. Groups are files; a lease has a number.

    Args:
        plan: of each worker.
        groups: all of them.
        doomed: the worker that is killed when it has written a continuation, and holds a lease.

    Attributes:
        results: the finished groups, by the names of their tasks.
        progressed: workers that have written a continuation.
    """

    def __init__(self, plan: Plan, groups: list[Group], *, doomed: int) -> None:
        self.results: dict[str, Group] = {}
        self.progressed: set[int] = set()
        self._plan = plan
        self._doomed = doomed
        self._inputs = {f"prompt-{group[0].group_index}": group for group in groups}
        self._waiting = deque(self._inputs)
        self._leases: dict[str, tuple[int, int]] = {}  # worker and number
        self._number = 0
        self._changed = threading.Condition()
        self._workers: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join()

    def start_worker(self) -> None:
        command = [sys.executable, "-m", "support.host.leases", json.dumps(vars(self._plan))]
        path = os.pathsep.join([str(TESTS), *sys.path])
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        thread = threading.Thread(target=self._serve, args=(len(self._workers), worker))
        self._workers.append(worker)
        self._threads.append(thread)
        thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until every group has a result."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.results) == len(self._inputs), seconds), self._waiting

    def _serve(self, number: int, worker: subprocess.Popen[str]) -> None:
        """Answer what a worker says, until it has ended."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            for line in worker.stdout:
                answer = self._answer(number, json.loads(line))
                worker.stdin.write(json.dumps(answer) + "\n")
                worker.stdin.flush()
        worker.wait()
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
        worker.stdout.close()
        with self._changed:
            for task in [task for task, (owner, _) in self._leases.items() if owner == number]:
                del self._leases[task]
                self._waiting.append(task)
            self._changed.notify_all()

    def _answer(self, worker: int, said: dict[str, Any]) -> dict[str, Any] | None:
        with self._changed:
            if "lease" not in said:
                return self._take(worker)
            lease, group = said["lease"], pickle.loads(Path(said["group"]).read_bytes())
            assert self._leases[lease["task"]] == (worker, lease["number"]), "another worker has the lease"
            if said["is_finished"]:
                assert lease["task"] not in self.results
                self.results[lease["task"]] = group
                del self._leases[lease["task"]]
            else:
                self._inputs[lease["task"]] = group
                self.progressed.add(worker)
                if worker == self._doomed:
                    self._workers[worker].kill()
            self._changed.notify_all()
            return None

    def _take(self, worker: int) -> dict[str, Any] | None:
        """Lease a group, if one is waiting; None: all have results."""
        if not self._waiting:
            return None if len(self.results) == len(self._inputs) else {}
        task = self._waiting.popleft()
        self._number += 1
        self._leases[task] = worker, self._number
        path = Path(self._plan.folder) / f"{task}-{self._number}-input"
        path.write_bytes(pickle.dumps(self._inputs[task]))
        return {"lease": {"task": task, "number": self._number}, "group": str(path)}


@dataclass
class QueueReader:
    """A worker's data source."""

    folder: str
    buffer: list[Group] = field(default_factory=list)
    _written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get_samples(self) -> Group | None:
        """The next group: one that was aborted here, or a leased one; None: there are no more."""
        if self.buffer:
            return self.buffer.pop(0)
        while not (taken := self._ask({})):
            if taken is None:
                return None
            time.sleep(POLL_SECONDS)
        group: Group = pickle.loads(Path(taken["group"]).read_bytes())
        for sample in group:
            vars(sample).update(_queue_lease=taken["lease"], _queue_generation_start=len(sample.tokens))
        return group

    def add_samples(self, group: Group) -> None:
        """Keep an aborted group: what was written replaces everything in its samples."""
        saved = self._report(group, is_finished=False)
        for sample, kept in zip(group, saved, strict=True):
            vars(sample).clear()
            vars(sample).update(vars(kept))
        self.buffer.append(group)

    def complete(self, group: Group) -> None:
        self._report(group, is_finished=True)

    def _report(self, group: Group, *, is_finished: bool) -> Group:
        (lease,) = {json.dumps(vars(sample)["_queue_lease"]) for sample in group}
        self._written += 1
        path = Path(self.folder) / f"{os.getpid()}-{self._written}-output"
        path.write_bytes(pickle.dumps(group))
        self._ask({"lease": json.loads(lease), "group": str(path), "is_finished": is_finished})
        saved: Group = pickle.loads(path.read_bytes())
        return saved

    def _ask(self, said: dict[str, Any]) -> Any:
        with self._lock:
            print(json.dumps(said), flush=True)
            return json.loads(sys.stdin.readline())


async def _work(plan: Plan, args: Any) -> None:
    """Generate in all slots until the queue has no more groups."""
    reader, state = QueueReader(plan.folder), GenerateState(args)

    async def slot() -> None:
        while (group := await asyncio.to_thread(reader.get_samples)) is not None:
            group = await generate_and_rm_group(args, group, state.sampling_params.copy())
            is_aborted = any(sample.status is Sample.Status.ABORTED for sample in group)
            await asyncio.to_thread(reader.add_samples if is_aborted else reader.complete, group)

    await asyncio.gather(*(slot() for _ in range(plan.slots)))


if __name__ == "__main__":
    _plan = Plan(**json.loads(sys.argv[1]))
    with installed(_plan.host):
        _args = arguments(_plan.url, Config(vocab_size=_plan.vocabulary), **_plan.options)
        run(_work(_plan, _args))
