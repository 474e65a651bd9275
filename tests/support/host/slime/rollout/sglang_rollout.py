"""The trainer's rollout: groups of samples in flight until there are enough; the rest is aborted and returned.

In vime the module is called ``vllm_rollout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from support.host import engine
from support.host.slime.observability.trace_utils import trace_function, trace_span
from support.host.slime.rollout.base_types import RolloutFnEvalOutput
from support.host.slime.rollout.rm_hub import async_rm, batched_async_rm
from support.host.slime.rollout.sample_hooks import apply_rollout_sample_hooks
from support.host.slime.utils.http_utils import get, post
from support.host.slime.utils.misc import SingletonMeta, load_function
from support.host.slime.utils.processing_utils import encode_image_for_rollout_engine, load_processor, load_tokenizer
from support.host.slime.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import SimpleNamespace

    from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
    from support.host.slime.utils.processing_utils import HostProcessor, HostTokenizer

SamplingParams = dict[str, Any]
Task = asyncio.Task[Any]

# Newer slime cancels generators whose abort_mode is request. Older slime ignores abort_mode.
knows_request_abort = True
# Seconds between two load queries to an engine that is not idle yet.
POLL_SECONDS = 0.02


class GenerateState(metaclass=SingletonMeta):
    """What all generations share. ``generating`` maps the task of each running generator to its abort mode."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = load_processor(args.hf_checkpoint)
        self.sampling_params: SamplingParams = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            **engine.current().sampling_params(args),
        }
        # Samples in flight of each data-parallel rank, and the one of the sample that was started last.
        self.dp_counts = [0] * (engine.current().option(args, "dp_size") or 1)
        self.dp_rank = 0
        self.reset()

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Count a sample to the rank with the fewest."""
        rank = self.dp_rank = self.dp_counts.index(min(self.dp_counts))
        self.dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def reset(self) -> None:
        """Start a new rollout, maybe in a new event loop."""
        self.semaphore = asyncio.Semaphore(engine.current().option(self.args, "server_concurrency"))  # of one loop
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[list[Sample]]] = set()
        self.generating: dict[Task, str] = {}
        self.cancelled: set[Task] = set()
        self.aborted = False

    def submit_generate_tasks(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            generation = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(generation))
        self.remaining_batch_size += len(groups)


def _prepare_prompt_ids(sample: Sample, tokenizer: HostTokenizer, processor: HostProcessor | None) -> list[int]:
    """Give the ids of the prompt, or the sample's own list of tokens when it has some."""
    if sample.tokens:
        return sample.tokens
    assert isinstance(sample.prompt, str)
    images = (sample.multimodal_inputs or {}).get("images")
    if not images or processor is None:
        return tokenizer.encode(sample.prompt, add_special_tokens=False)
    made = processor(text=sample.prompt, images=images)
    ids: list[int] = made.pop("input_ids")[0]
    del made["attention_mask"]
    sample.multimodal_train_inputs = made
    return ids


async def generate(args: SimpleNamespace, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Generate without streaming: the trainer's default. Only a server abort ends it."""
    state = GenerateState(args)
    assert sample.status in {Sample.Status.PENDING, Sample.Status.ABORTED}, sample.status
    ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    budget = sampling_params["max_new_tokens"] - sample.response_length
    assert budget >= 0, budget
    if budget == 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    here = engine.current()
    images = (sample.multimodal_inputs or {}).get("images")
    data = (sample.prompt, [encode_image_for_rollout_engine(image) for image in images]) if images else None
    payload = here.payload(args, {**sampling_params, "max_new_tokens": budget}, ids, data)
    sample.tokens = sample.tokens or ids
    policy, header = here.session
    headers = {header: sample.session_id} if sample.session_id and args.router_policy == policy else None
    output = await post(here.router(args) + here.path, payload, headers)
    sample.append_response_tokens(args, **here.read(output, state.tokenizer.decode))
    return sample


@trace_function("generate_and_rm", "sample")
async def generate_and_rm(
    args: SimpleNamespace, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Any:
    """Generate one sample, or a list that a generator made of it, with rewards; finished ones come back as they are."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in {Sample.Status.COMPLETED, Sample.Status.TRUNCATED}:
        assert args.group_rm or sample.reward is not None
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.dp_rank_context():
            sample = await _generate(args, sample, sampling_params, evaluation=evaluation)
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    if isinstance(sample, list):
        open_ones = [each for each in sample if each.reward is None]
        if not args.group_rm and all(each.status is not Sample.Status.ABORTED for each in sample):
            with trace_span(open_ones, "reward_model"):
                rewards = await batched_async_rm(args, open_ones)
            for each, reward in zip(open_ones, rewards, strict=True):
                each.reward = reward
        return sample
    if not args.group_rm and sample.status is not Sample.Status.ABORTED and sample.reward is None:
        with trace_span(sample, "reward_model"):
            sample.reward = await async_rm(args, sample)
    return sample


async def _generate(
    args: SimpleNamespace, sample: Sample, sampling_params: SamplingParams, *, evaluation: bool
) -> Sample:
    """Run the generator in a task of its own, the one that a request abort cancels."""
    state = GenerateState(args)
    function = load_function(sample.generate_function_path or args.custom_generate_function_path or generate)
    options = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    task: asyncio.Task[Sample] = asyncio.create_task(function(args, sample, sampling_params, **options))
    state.generating[task] = getattr(function, "abort_mode", "server") if knows_request_abort else "server"
    from_outside: asyncio.CancelledError | None = None
    try:
        # Not by awaiting the task itself: that could not tell who cancelled it.
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as cancelled:  # noqa: PERF203  # one round, and one for each cancel
                from_outside = cancelled
                task.cancel()
    finally:
        del state.generating[task]
    if from_outside is not None:
        if not task.cancelled():
            task.exception()  # it counts as seen
        raise from_outside
    if task.cancelled() and task in state.cancelled:
        sample.status = Sample.Status.ABORTED
        return sample
    return task.result()


@trace_function("generate_and_rm_group", "group")
async def generate_and_rm_group(
    args: SimpleNamespace, group: list[Sample], sampling_params: SamplingParams, evaluation: bool = False
) -> list[Sample]:
    """Generate the samples of one prompt, each with a copy of the parameters."""
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in group:
        sample.session_id = sample.session_id or str(uuid.uuid4())
    tasks = []
    for i, sample in enumerate(group):
        params = sampling_params.copy()
        if engine.current().option(args, "enable_deterministic_inference"):
            params[engine.current().seed] = args.rollout_seed + i
        tasks.append(asyncio.create_task(generate_and_rm(args, sample, params, evaluation)))
    try:
        group = await asyncio.gather(*tasks)
    except BaseException:
        await _cancel(tasks)
        raise
    if args.group_rm and not state.aborted:
        with trace_span(group, "group_reward_model"):
            rewards = await batched_async_rm(args, group)
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = reward
    return group


async def abort(args: SimpleNamespace, rollout_id: int) -> list[list[Sample]]:
    """Abort what is in flight; return the groups that have a partial response."""
    state = GenerateState(args)
    assert not state.aborted
    state.aborted = True
    for task, mode in state.generating.items():
        if mode == "request":
            state.cancelled.add(task)
            task.cancel()
    if not knows_request_abort or "server" in state.generating.values():
        await _abort_servers(args)
    partial = []
    while state.pendings:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for pending in done:
            group = pending.result()
            if args.partial_rollout and any(s.status is Sample.Status.ABORTED and s.response_length for s in group):
                partial.append(group)
    for sample in (sample for group in partial for sample in group):
        if sample.response:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return partial


async def _abort_servers(args: SimpleNamespace) -> None:
    here = engine.current()
    urls = [worker["url"] for worker in (await get(f"{here.router(args)}/workers"))["workers"]]
    path, body = here.abort_all
    while True:
        await asyncio.gather(*(post(url + path, body) for url in urls))
        loads = await asyncio.gather(*(get(url + here.load_path) for url in urls))
        if not any(here.busy(load) for load in loads):
            return
        await asyncio.sleep(POLL_SECONDS)


async def generate_rollout_async(
    args: SimpleNamespace, rollout_id: int, data_source: RolloutDataSourceWithBuffer
) -> list[list[Sample]]:
    """Give ``args.rollout_batch_size`` groups by their indices; partial ones go back to the data source.

    More are started than needed; those that are finished but not needed are dropped.
    """
    state = GenerateState(args)
    target = args.rollout_batch_size
    groups: list[list[Sample]] = []
    bar = tqdm(total=target * args.n_samples_per_prompt, desc="Rollout generation")
    try:
        while len(groups) < target:
            while state.remaining_batch_size < target:
                state.submit_generate_tasks(data_source.get_samples(args.over_sampling_batch_size))
            done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not groups:
                    _log("First rollout sample", task.result())
                groups.append(task.result())
                if len(groups) <= target:
                    bar.update(args.n_samples_per_prompt)
        bar.close()
        _log("Finish rollout", groups[target - 1])
        data_source.add_samples(await abort(args, rollout_id))
    except BaseException:
        await _cancel(state.pendings)
        raise
    finally:
        state.reset()
    return sorted(groups[:target], key=lambda group: group[0].index or 0)


def generate_rollout(
    args: SimpleNamespace, rollout_id: int, data_source: RolloutDataSourceWithBuffer
) -> list[list[Sample]]:
    """Do the same in an event loop of its own."""
    return asyncio.run(generate_rollout_async(args, rollout_id, data_source))


async def eval_rollout(args: SimpleNamespace, rollout_id: int) -> tuple[Any, list[Any]]:
    """Generate the samples of ``args.eval_datasets``, each with a name and samples of its own."""
    found: dict[str, dict[str, Any]] = {}
    for name, prompts in args.eval_datasets:
        params = GenerateState(args).sampling_params.copy()
        work = [generate_and_rm(args, copy.deepcopy(sample), params, evaluation=True) for sample in prompts]
        samples = await asyncio.gather(*work)
        found[name] = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return (RolloutFnEvalOutput(found) if knows_request_abort else found), []


class tqdm:  # noqa: N801  # as the package that the trainer imports
    """A bar that is not drawn."""

    bars: ClassVar[list[tqdm]] = []

    def __init__(self, *, total: int, desc: str) -> None:
        self.total, self.desc, self.n, self.closed = total, desc, 0, False
        self.bars.append(self)

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        self.closed = True


def _log(what: str, group: list[Any]) -> None:
    sample = group[0][0] if isinstance(group[0], list) else group[0]
    logger = logging.getLogger(f"{engine.current().package}.rollout.{engine.current().name}_rollout")
    text, label = [str(sample.prompt) + sample.response], str(sample.label)[:100]
    logger.info(f"{what}: {text}, label: {label}, reward: {sample.reward}")


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks whose results are not wanted, and wait for them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
