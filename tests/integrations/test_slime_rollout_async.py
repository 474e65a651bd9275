"""Fully asynchronous rollouts (generate_rollout_async): groups stay in flight across rollouts, and none is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold import slime, vime
from streamfold.errors import StreamfoldError
from streamfold.integrations.clients import _handles
from streamfold.loopback import Loopback
from support.host import engine as engines
from support.host import installed
from support.host.helpers import LIMIT, Rewards, Scripted, Waiting, append, nowhere
from support.host.slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host.slime.utils.types import Sample
from support.host_calls import HOSTS, Status, assert_undisturbed, entry_module, loopback_engine, streaming
from support.paths import TESTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import SimpleNamespace

newer_and_older = pytest.mark.parametrize("new", [True, False], ids=["newer", "older"])


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    slime.close_rollout()
    vime.close_rollout()
    assert not {thread for thread in set(threading.enumerate()) - threads if "streamfold" in thread.name}
    assert _handles == {}


@pytest.fixture(params=HOSTS)
def host(_nothing_left: None, request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield
        entry_module().close_rollout()


def scripted(generate: Callable[..., Any], **settings: Any) -> SimpleNamespace:
    """Arguments for a generator without an engine; one sample per group, two groups per rollout, four in flight."""
    usual = {"n_samples_per_prompt": 1, "rollout_batch_size": 2, "streamfold_in_flight": 4, "partial_rollout": True}
    return nowhere(**{**usual, "custom_generate_function_path": generate, **settings})


def given(args: SimpleNamespace, rollout_id: int, source: Any) -> list[list[Sample]]:
    output = entry_module().generate_rollout_async(args, rollout_id, source)
    groups: list[list[Sample]] = output.samples if isinstance(output, RolloutFnTrainOutput) else output
    return groups


def soon(true: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("name", HOSTS)
@newer_and_older
@pytest.mark.parametrize("partial_rollout", [True, False], ids=["with the option", "without it"])
def test_groups_stay_in_flight_while_weights_change_and_finish_as_if_undisturbed(
    name: str, new: bool, partial_rollout: bool
) -> None:
    rewards = Rewards()
    box: dict[str, Any] = {"token_rate": 700, "stop_probability": 1 / 30, "seed": 3, "weight_version": "0"}
    with installed(name, new=new), loopback_engine(**box) as engine:
        here = engines.current().name
        args = streaming(
            engine,
            custom_generate_function_path=None,
            partial_rollout=partial_rollout,
            custom_rm_path=rewards,
            rollout_batch_size=3,
            rollout_max_response_len=60,
            **{f"{here}_enable_deterministic_inference": True, f"{here}_server_concurrency": 12},
            streamfold_tries=9,
            save="unused",
        )
        state = GenerateState(args)
        source = entry_module().DataSource(args)
        groups: list[list[Sample]] = []
        rollouts = itertools.count()

        def more() -> list[list[Sample]]:
            output = entry_module().generate_rollout_async(args, next(rollouts), source)
            assert isinstance(output, RolloutFnTrainOutput if new else list)
            if isinstance(output, RolloutFnTrainOutput):
                assert (output.metrics or {})["streamfold/tokens/lost"] == 0
            return output.samples if isinstance(output, RolloutFnTrainOutput) else output

        def runs() -> bool:
            before = engine.stats().tokens
            while (now := engine.stats()).running and now.tokens == before:
                time.sleep(0.002)
            return now.running > 0

        for version in range(1, 6):
            groups += more()
            while not runs():  # as many as the pool wants may be finished: make room for others
                groups += more()
            assert not state.aborted
            body = {"new_version": str(version), "abort_all_requests": True}
            if here == "vllm":  # there it is another endpoint that aborts
                httpx.post(f"{engine.url}/abort_requests", json={}, trust_env=False).raise_for_status()
            httpx.post(f"{engine.url}/update_weight_version", json=body, trust_env=False).raise_for_status()
        entry_module().close_rollout()
        assert not state.aborted
        assert engine.stats().running == 0
        for sample, i in ((sample, i) for group in groups for i, sample in enumerate(group)):
            assert_undisturbed(engine, args, sample, {**state.sampling_params, "sampling_seed": args.rollout_seed + i})
            assert sum(call is sample for call in rewards.calls) == 1
        waiting = source.buffer.take(len(source.buffer))
        calls = max(len(sample.weight_versions) for group in groups + waiting for sample in group)
        assert calls > 1, "a weight update came in the middle of a response"
        assert sorted(g[0].group_index for g in groups + waiting) == list(range(source.buffer.position))
        assert len(groups) == 3 * next(rollouts)
        assert len(waiting) > 0


@pytest.mark.parametrize("name", HOSTS)
@newer_and_older
def test_groups_are_started_although_a_run_that_died_has_left_the_trainers_state_aborted(name: str, new: bool) -> None:
    with installed(name, new=new), loopback_engine(stop_probability=0) as engine:
        args = streaming(
            engine,
            custom_generate_function_path=None,
            rollout_batch_size=2,
            rollout_max_response_len=5,
            streamfold_in_flight=8,
        )
        state = GenerateState(args)
        state.aborted = True
        groups = given(args, 0, RolloutDataSourceWithBuffer(args))
        assert {sample.response_length for group in groups for sample in group} == {5}
        assert not state.aborted
        entry_module().close_rollout()


@pytest.mark.parametrize("end", [Status.ABORTED, OSError("tool")], ids=["aborted by the engine", "failed"])
@pytest.mark.parametrize("options", list(itertools.product([True, False], repeat=2)), ids=str)
def test_tokens_of_a_call_that_ended_early_are_carried_on_and_masked_only_with_both_options(
    host: None, end: Any, options: tuple[bool, bool]
) -> None:
    partial_rollout, masks = options
    args = scripted(
        Scripted({0: [(3, end), (2, Status.COMPLETED)]}),
        partial_rollout=partial_rollout,
        mask_offpolicy_in_partial_rollout=masks,
        rollout_batch_size=1,
        streamfold_in_flight=1,
        streamfold_tries=2,
        streamfold_sample_retries=0,
    )
    source = entry_module().DataSource(args)
    groups = [given(args, rollout_id, source)[0][0] for rollout_id in range(2)]
    (sample,) = [sample for sample in groups if sample.index == 0]
    assert sample.response == "xxxxx"
    assert sample.loss_mask == [0 if partial_rollout and masks else 1] * 3 + [1] * 2


def test_finished_groups_wait_for_the_next_rollout_and_keep_the_order_in_which_they_finished(host: None) -> None:
    generate = Scripted({0: [(1, "hang"), (1, Status.COMPLETED)]})
    args = scripted(generate)
    source = entry_module().DataSource(args)
    first, second = given(args, 0, source), given(args, 1, source)
    assert [group[0].index for group in first + second] == [1, 2, 3, 4]
    soon(lambda: len(generate.calls) > 7)
    entry_module().close_rollout()
    waiting = [group[0].index for group in source.buffer.take(len(source.buffer))]
    assert sorted(waiting) == [0, *range(5, source.buffer.position)]


def test_metrics_are_those_since_the_last_rollout_with_slimes_own_beside_them(host: None) -> None:
    args = scripted(Scripted(), dynamic_sampling_filter_path=lambda args, group: Verdict(group[0].index))
    source = entry_module().DataSource(args)
    metrics = [entry_module().generate_rollout_async(args, rollout_id, source).metrics for rollout_id in range(2)]
    assert [each["streamfold/groups/done"] for each in metrics] == [2, 2]
    assert sum(each["rollout/dynamic_filter/drop_odd"] for each in metrics) >= 3


class Verdict:
    """The result of a dynamic filter; here no batch could be too small."""

    reason = "odd"
    keep_when_insufficient = True

    def __init__(self, index: int) -> None:
        self.keep = index % 2 == 0


def test_a_group_that_is_too_stale_restarts(host: None) -> None:
    args = scripted(Scripted({0: [(1, "hang")]}), streamfold_max_staleness=1, streamfold_stale="restart")
    source = entry_module().DataSource(args)
    seen = []
    for rollout_id in range(4):
        given(args, rollout_id, source)
        entry_module().close_rollout()
        source.add_samples(waiting := source.buffer.take(len(source.buffer)))
        (old,) = [sample for (sample,) in waiting if sample.index == 0]
        seen.append((old.response, old.metadata["start_rollout_id"]))
    assert seen == [("x", 0), ("xx", 0), ("x", 2), ("xx", 2)]


def test_stale_tokens_are_masked_in_the_trainers_samples(host: None) -> None:
    args = scripted(
        Scripted({0: [(1, "hang"), (1, Status.COMPLETED)]}), streamfold_max_staleness=1, rollout_batch_size=1
    )
    args.streamfold_in_flight = 2
    source = entry_module().DataSource(args)
    first = given(args, 0, source)
    entry_module().close_rollout()
    ((sample,),) = given(args, 2, source)
    assert (first[0][0].index, sample.index, sample.response) == (1, 0, "xx")
    assert sample.metadata["streamfold_call_versions"] == [[0, 0, 1], [2, 1, 2]]
    assert sample.loss_mask == [0, 1]


def test_evaluation_runs_in_the_event_loop_of_the_groups_in_flight(host: None) -> None:
    loops: set[Any] = set()
    waiting = Waiting()

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        loops.add(asyncio.get_running_loop())
        if sample.index == 3:
            return await waiting(args, sample, sampling_params)
        append(sample, args, [7], text="x")
        sample.status = Status.COMPLETED
        return sample

    generate.__dict__["abort_mode"] = "request"
    args = scripted(generate, eval_datasets=[("a", [Sample(prompt="a"), Sample(prompt="b")])])
    source = entry_module().DataSource(args)
    before = entry_module().generate_rollout_async(args, 0, source, evaluation=True)
    given(args, 0, source)
    soon(lambda: waiting.running == 1)
    after = entry_module().generate_rollout_async(args, 0, source, evaluation=True)
    assert type(before) is type(after) is RolloutFnEvalOutput
    assert after.data["a"]["rewards"] == [1.0, 1.0]
    assert (waiting.running, waiting.cancels, len(loops)) == (1, 0, 1)


def test_after_an_error_everything_goes_back_and_the_next_call_starts_a_new_pool(
    host: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    generate = Scripted({index: [(1, OSError("tool")), (1, Status.COMPLETED)] for index in range(4)})
    args = scripted(generate, streamfold_max_failures=1, streamfold_sample_retries=0)
    source = entry_module().DataSource(args)
    with pytest.raises(StreamfoldError, match="max_failures") as caught:
        given(args, 0, source)
    assert isinstance(caught.value.__cause__, OSError)
    assert "tool" in caplog.text
    assert source.buffer.in_flight == 0
    assert not GenerateState(args).aborted
    groups = given(args, 0, source)
    assert [group[0].index for group in groups] == [0, 1]
    assert [group[0].response for group in groups] == ["xx", "xx"]


def test_a_source_that_ends_does_not_hang(host: None) -> None:
    args = scripted(Scripted())
    args.rollout_global_dataset = False
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(RuntimeError, match="missing"):
        given(args, 0, source)


def test_with_another_data_source_everything_goes_back_to_the_first(host: None) -> None:
    args = scripted(Scripted({index: [(1, "hang")] for index in range(2, 99)}))
    first, second = entry_module().DataSource(args), entry_module().DataSource(args)
    given(args, 0, first)
    given(args, 0, second)
    assert first.buffer.in_flight == 0
    assert sorted(group[0].index for group in first.buffer.take(99)[:4]) == [2, 3, 4, 5]
    assert second.buffer.in_flight == 4


def test_a_save_reads_samples_in_the_thread_that_writes_them_and_a_load_is_refused_until_the_end(
    host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    whole = Sample.to_dict

    def to_dict(self: Sample) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        return whole(self)

    monkeypatch.setattr(Sample, "to_dict", to_dict)
    args = scripted(Scripted({2: [(1, "hang"), (1, Status.COMPLETED)]}), save=str(tmp_path), load=str(tmp_path))
    source = entry_module().DataSource(args)
    given(args, 0, source)
    source.save(0)
    assert threads == {"streamfold rollouts"}
    with pytest.raises(RuntimeError, match="close_rollout"):
        source.load(0)
    entry_module().close_rollout()
    source.load(0)
    waiting = source.buffer.take(len(source.buffer))
    assert sorted(group[0].index for group in waiting) == list(range(2, source.buffer.position))
    assert given(args, 1, source)
    threads.clear()
    entry_module().close_rollout()
    source.save(1)
    assert threads == {threading.current_thread().name}


def test_groups_in_flight_do_not_wait_for_the_disk(host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = scripted(Scripted({2: [(1, "hang"), (1, Status.COMPLETED)]}), save=str(tmp_path))
    source = entry_module().DataSource(args)
    given(args, 0, source)
    slow: list[str] = []
    monkeypatch.setattr("os.fsync", lambda file: slow.append(threading.current_thread().name))
    source.save(0)
    assert set(slow) == {threading.current_thread().name}


def test_an_interrupted_wait_leaves_everything_in_flight(host: None) -> None:
    generate = Scripted({0: [(1, "hang"), (1, Status.COMPLETED)]})
    args = scripted(generate, streamfold_in_flight=1)
    source = entry_module().DataSource(args)

    def interrupt(*_args: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            given(args, 0, source)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert (generate.running, source.buffer.in_flight) == (1, 1)
    entry_module().close_rollout()
    assert [group[0].index for group in given(args, 0, source)] == [0, 1]


def test_an_invalid_setting_is_refused_and_nothing_is_started(host: None) -> None:
    args = scripted(Scripted(), streamfold_in_flight=0)
    source = entry_module().DataSource(args)
    with pytest.raises(ValueError, match="in_flight"):
        given(args, 0, source)
    args.streamfold_in_flight = None
    assert len(given(args, 0, source)) == 2


def test_closing_twice_or_without_a_rollout_does_nothing(host: None) -> None:
    entry_module().close_rollout()
    args = scripted(Scripted())
    given(args, 0, entry_module().DataSource(args))
    entry_module().close_rollout()
    entry_module().close_rollout()


def test_a_process_that_ends_with_groups_in_flight_aborts_them_and_ends_at_once_and_silently() -> None:
    program = """
import contextlib, sys
sys.path.insert(0, sys.argv[1])
from support.host import arguments, installed
from streamfold import slime

contextlib.ExitStack().enter_context(keep := installed())  # to the end
args = arguments(sys.argv[2], rollout_max_response_len=20_000, rollout_batch_size=1, streamfold_in_flight=16)
assert slime.generate_rollout_async(args, 0, slime.DataSource(args)).samples
sys.exit(3)
"""
    # The first group ends in half a second, the last one in seven: some are in flight however slowly the process ends.
    with Loopback(token_rate=100, stop_probability=1 / 200, incremental=True) as engine:
        command = [sys.executable, "-W", "error", "-c", program, str(TESTS), engine.url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert (ended.returncode, ended.stderr) == (3, ""), ended.stderr
        assert [request for request in engine.seen() if request.path == "/abort_request"]
        soon(lambda: engine.stats().running == 0)


@pytest.mark.parametrize("and_then", ["generates", "ends"])
def test_a_forked_process_starts_a_new_pool_and_ends(and_then: str) -> None:
    program = """
import contextlib, os, signal, sys
sys.path.insert(0, sys.argv[1])
from support.host import installed
from support.host.helpers import Scripted, nowhere
from streamfold import slime

contextlib.ExitStack().enter_context(keep := installed())  # to the end
args = nowhere(custom_generate_function_path=Scripted(), streamfold_in_flight=8)
source = slime.DataSource(args)
assert slime.generate_rollout_async(args, 0, source).samples
child = os.fork()
if not child:
    signal.alarm(60)  # nothing else would end it
    try:
        source.get_samples(1)
    except RuntimeError as error:
        assert "forked" in str(error), error
    else:
        raise AssertionError
    if sys.argv[2] == "generates":
        assert slime.generate_rollout_async(args, 0, slime.DataSource(args)).samples
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
assert slime.generate_rollout_async(args, 1, source).samples
sys.exit(3)
"""
    command = [sys.executable, "-c", program, str(TESTS), and_then]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT, check=False)
    assert ended.returncode == 3, ended.stderr
