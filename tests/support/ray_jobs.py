"""What runs in the actors of the tests: sources, rewards and generate functions that can be pickled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from streamfold import Buffer, Client, Experts, RolloutConfig
from streamfold.samples.sample import Sample
from support.rollouts import append, groups_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from typing_extensions import Self

    from streamfold.loopback import Loopback
    from streamfold.ray import RolloutWorkers

SHAPE = Experts(4, 2, num_experts=16)


def config(groups: int, **options: Any) -> RolloutConfig:
    """A configuration whose responses have 16 tokens, and which keeps what is aborted."""
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    defaults: dict[str, Any] = {"sampling_params": params, "partial_rollout": True, "progress": False}
    return RolloutConfig(groups=groups, **{**defaults, **options})


class Make:
    """Makes the client of an engine, and a buffer of so many groups."""

    def __init__(self, url: str, groups: int) -> None:
        self.url = url
        self.groups = groups

    def client(self) -> Client:
        return Client(self.url, experts=SHAPE)

    def buffer(self) -> Buffer:
        return Buffer(groups_of(self.groups))


@contextlib.asynccontextmanager
async def open_workers(
    engine: Loopback, config: RolloutConfig, groups: int, **options: Any
) -> AsyncIterator[RolloutWorkers]:
    """Two workers on an engine, which share a buffer of so many groups."""
    from streamfold.ray import RolloutWorkers  # noqa: PLC0415 - the actors of a test need it first

    make = Make(engine.url, groups)
    defaults: dict[str, Any] = {"client": make.client, "source": make.buffer, "worker_options": {"num_cpus": 0}}
    async with RolloutWorkers(2, config=config, **{**defaults, **options}) as opened:
        yield opened


class DiesWhenOpened(Client):
    """A client with which the process is killed that opens it, as often as ``folder`` has a file."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url, experts=SHAPE)
        self.folder = folder

    async def __aenter__(self) -> Self:
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return await super().__aenter__()


def undisturbed(engine: Loopback, sample: Sample, params: dict[str, Any]) -> Sample:
    """The sample as the engine gives it to one that nobody disturbs."""
    prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
    whole = engine.undisturbed(prompt, params, return_logprob=True)
    tokens = [*prompt, *whole.token_ids]
    log_probs = cast("list[float]", whole.logprobs)
    return Sample(tokens=tokens, rollout_log_probs=log_probs, response_length=len(whole.token_ids))


def length(sample: Sample) -> float:
    """A reward."""
    return float(len(sample.tokens))


class Awkward(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def failing(error: Callable[[], Exception]) -> Callable[[Client], Any]:
    """Makes a generate function that raises an error."""

    def make(_client: Client) -> Any:
        async def generate(sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Sample:
            raise error()

        return generate

    return make


class Noting:
    """Generates two tokens at once, and notes which process did; waits while ``folder`` has no file ``go``."""

    abort_mode = "request"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, _client: Client) -> Any:
        return self.generate

    async def gone(self) -> None:
        """Wait for the file."""
        while not (self.folder / "go").exists():  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(0.01)

    async def generate(self, sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Sample:
        sample.metadata["pid"] = os.getpid()
        append(sample, 2)
        await self.gone()
        sample.status = Sample.Status.COMPLETED
        return sample


class TwoTurns(Noting):
    """Generates three tokens; in the next turn two more, but only in a process that came after ``go``."""

    async def generate(self, sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Sample:
        if not sample.response_length:
            append(sample, 3)
        sample.metadata.setdefault("pids", []).append(os.getpid())
        await self.gone()
        append(sample, 2)
        sample.status = Sample.Status.COMPLETED
        return sample


def descendants() -> dict[int, str]:
    """The processes below this one, with what they are called."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
                name = (folder / "cmdline").read_text().replace("\0", " ").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)], names[int(folder.name)] = int(parent), name
    found = {os.getpid()}
    for _ in range(5):
        found |= {pid for pid, parent in parents.items() if parent in found}
    return {pid: names[pid] for pid in found - {os.getpid()} if pid in names}


def actors() -> list[str]:
    """The processes below this one in which an actor of ours runs."""
    return [name for name in descendants().values() if name.startswith(("ray::Worker", "ray::BufferActor"))]
