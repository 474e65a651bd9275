"""Routed experts of samples that are resumed: the rows kept stay as they are, and only later ones are requested."""

from __future__ import annotations

import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Client, DecodeError, Experts, Generation
from streamfold.loopback import Faults, Loopback, Router
from streamfold.samples.completion import complete
from streamfold.samples.experts import adds_rows, kept_experts, kept_rows
from streamfold.samples.merging import merge
from streamfold.samples.options import CompletionOptions
from streamfold.samples.reset import restart, rewind
from streamfold.samples.sample import Sample
from support.completing import SOON
from support.host.helpers import nowhere
from support.host.slime.utils.types import Sample as HostSample
from support.replay import DONE, Replay, event, stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHAPE = Experts(4, 2, 16, "uint8")
ARGS = nowhere(num_layers=4, moe_router_topk=2, num_experts=16)
PROMPT = [300, 301, 302, 303]
ENGINES: dict[str, dict[str, Any]] = {
    "cumulative": {},
    "incremental": {"incremental": True},
    "several tokens": {"incremental": True, "tokens_per_step": 3},
    "0.5.11": {"version": "0.5.11"},
    "0.5.11 incremental": {"version": "0.5.11", "incremental": True},
    "vllm": {"engine": "vllm", "return_routed_experts": True},
}


class OldHost(HostSample):
    """Of a release that does not know ``routed_experts_start_len``."""

    def append_response_tokens(
        self, args: Any = None, *, meta_info: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        known = {key: value for key, value in (meta_info or {}).items() if key != "routed_experts_start_len"}
        super().append_response_tokens(args, meta_info=known, **more)


class NewHost(HostSample):
    """Of a release that keeps the rows of each call by themselves, in a list that it extends in place."""

    def get_rollout_routed_experts_length(self) -> int:
        parts: Any = self.rollout_routed_experts
        if isinstance(parts, list):
            return sum(len(part) for part in parts)
        return 0 if parts is None else len(parts)

    def materialize_rollout_routed_experts(self, *, replace: bool = True) -> Any:
        parts: Any = self.rollout_routed_experts
        whole = np.concatenate(parts) if isinstance(parts, list) else parts
        if replace:
            self.rollout_routed_experts = whole
        return whole

    def _set_routed_experts(self, args: Any, meta: Mapping[str, Any]) -> None:
        kept: Any = self.rollout_routed_experts
        if not meta.get("routed_experts_start_len"):
            super()._set_routed_experts(args, meta)
            return
        assert meta["routed_experts_start_len"] == self.get_rollout_routed_experts_length()
        new = np.asarray(meta["routed_experts"], np.int32)
        assert len(new) == len(self.tokens) - 1 - meta["routed_experts_start_len"]
        if isinstance(kept, list):
            kept.append(new)
        else:
            self.rollout_routed_experts = [kept, new]  # type: ignore[assignment]


KINDS: list[Any] = [Sample, HostSample, OldHost, NewHost]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__.split(".")[0] + "." + kind.__name__)


def engine_of(name: str, **more: Any) -> Loopback:
    return Loopback(**ENGINES[name], **more)


def client_of(engine: Any, *, of: Loopback | None = None, experts: Experts = SHAPE) -> Client:
    return Client(engine.url, engine=(of or engine).config.engine, experts=experts, retries=SOON)


def rows_of(sample: Any) -> list[Any]:
    rows: list[Any] = np.asarray(kept_experts(sample)).astype(np.int32).tolist()
    return rows


def undisturbed_rows(engine: Loopback, prompt: Sequence[int], params: dict[str, Any]) -> list[Any]:
    """The rows of one call of the model that an engine serves; the same in SGLang's format and in vLLM's."""
    with Loopback(num_experts=engine.config.num_experts, seed=engine.config.seed) as same:
        raw = same.undisturbed(prompt, params, return_routed_experts=True).routed_experts
    assert raw is not None
    return np.frombuffer(raw, "<i4").reshape(-1, 4, 2).tolist()


def params_of(limit: int) -> dict[str, Any]:
    return {"max_new_tokens": limit, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 5}


async def reach(client: Client, sample: Any, limit: int, **options: Any) -> None:
    """Bring a sample to a number of response tokens, as if it was aborted there."""
    await complete(client, sample, params_of(limit), options=CompletionOptions(**options), args=ARGS)
    assert sample.response_length == limit
    sample.status = type(sample.status)["ABORTED"]


def without_experts(generation: Generation) -> Generation:
    args, kwargs = generation.__getnewargs_ex__()
    return Generation(*args, **{**kwargs, "routed_experts": None, "padded_rows": 0})


def requested_starts(engine: Loopback) -> list[int]:
    bodies = [seen.json() for seen in engine.seen() if seen.method == "POST"]
    if engine.config.engine == "vllm":
        return [body["sampling_params"].get("routed_experts_prompt_start", 0) for body in bodies]
    return [body.get("routed_experts_start_len", 0) for body in bodies]


@each_kind
@pytest.mark.parametrize("name", ENGINES)
async def test_a_sample_that_is_cut_anywhere_ends_with_the_rows_of_one_call(name: str, kind: Any) -> None:
    """Calls whose rows were lost, as those of an abort in the queue, leave fewer rows than tokens."""
    dice = random.Random(f"{name} {kind}")
    with engine_of(name) as engine:
        wanted = undisturbed_rows(engine, PROMPT, params_of(30))
        async with client_of(engine) as client:
            for _ in range(6):
                sample, starts = kind(tokens=[*PROMPT]), list[int]()
                for end in [*sorted(dice.sample(range(1, 30), dice.randint(1, 5))), 30]:
                    kept = kept_rows(sample)
                    starts.append(kept)
                    if dice.random() < 0.3 and end < 30:
                        left = params_of(end - sample.response_length)
                        generation = await client.generate(sample.tokens, left, experts_start=kept)
                        merge(sample, without_experts(generation), ARGS)
                        sample.status = type(sample.status)["ABORTED"]
                        assert kept_rows(sample) == kept
                    else:
                        await reach(client, sample, end)
                        assert rows_of(sample) == wanted[: len(sample.tokens) - 1]
                assert rows_of(sample) == wanted
                assert requested_starts(engine)[-len(starts) :] == starts
            if kind is Sample:
                assert sample.rollout_routed_experts.dtype == np.uint8


@each_kind
@pytest.mark.parametrize("first", ["cumulative", "0.5.11 incremental", "vllm"])
@pytest.mark.parametrize("later", ["incremental", "0.5.11", "vllm"])
async def test_the_rows_kept_are_those_of_the_weights_that_sampled_them(first: str, later: str, kind: Any) -> None:
    """Another engine, or the same one with other weights: the first one's rows are never replaced."""
    sample = kind(tokens=[*PROMPT])
    with engine_of(first) as old, engine_of(later, num_experts=7, seed=3) as new:
        async with client_of(old) as client:
            await reach(client, sample, 9)
        cut, kept = list(sample.tokens), rows_of(sample)
        assert kept == undisturbed_rows(old, PROMPT, params_of(9))
        async with client_of(new) as client:
            await reach(client, sample, 20)
        wanted = undisturbed_rows(new, cut, params_of(11))
    assert wanted[: len(kept)] != kept
    assert rows_of(sample) == kept + wanted[len(kept) :]


@pytest.mark.parametrize("knows_start", [True, False])
async def test_rows_that_come_in_another_dtype_are_added_as_int32(knows_start: bool) -> None:
    drops = ("routed_experts_dtype", *(() if knows_start else ("routed_experts_start_len",)))
    with Loopback() as engine, Router([engine], drops=drops) as router:
        for limit in range(10, 40, 7):  # some of which have as many bytes as all rows would have as uint8
            sample = Sample(tokens=[*PROMPT])
            async with client_of(engine) as client:
                await reach(client, sample, 9)
            assert sample.rollout_routed_experts is not None
            assert sample.rollout_routed_experts.dtype == np.uint8
            async with client_of(router, of=engine) as client:
                await reach(client, sample, limit)
            assert sample.rollout_routed_experts.dtype == np.int32
            assert rows_of(sample) == undisturbed_rows(engine, PROMPT, params_of(limit))


@pytest.mark.parametrize("fault", ["retract_abort", "abort"])
@pytest.mark.parametrize("name", ["cumulative", "incremental", "0.5.11"])
async def test_after_an_abort_without_rows_those_kept_before_it_say_where_to_start(name: str, fault: str) -> None:
    with engine_of(name) as engine:
        wanted = undisturbed_rows(engine, PROMPT, params_of(30))
        async with client_of(engine) as client:
            sample = Sample(tokens=[*PROMPT])
            await reach(client, sample, 6)
            engine.faults = Faults([{"kind": fault, "after_tokens": 5, "times": 2}])
            await reach(client, sample, 30)
        starts = requested_starts(engine)
    assert rows_of(sample) == wanted
    assert sample.metadata["streamfold_resumed"] == 2
    # A request that was put back into the queue brings no rows.
    kept = [0, 9, 9, 9] if fault == "retract_abort" else starts
    assert starts == kept
    assert len(set(starts)) == (2 if fault == "retract_abort" else 4)


@pytest.mark.parametrize("kind", KINDS)
async def test_padded_rows_among_those_kept_stay_and_are_no_others(kind: Any) -> None:
    with Loopback() as engine:
        async with client_of(engine) as client:
            sample = kind(tokens=[*PROMPT])
            await reach(client, sample, 9)
            kept = sample.rollout_routed_experts
            kept[[0, 5]] = -1 if kept.dtype == np.int32 else 255
            await reach(client, sample, 12)
        wanted = np.array(undisturbed_rows(engine, PROMPT, params_of(12)))
    wanted[[0, 5]] = -1
    if kind is Sample:
        assert sample.padded_rows == 2
        assert sample.rollout_routed_experts.dtype == np.uint8
        wanted[[0, 5]] = 255
    assert rows_of(sample) == wanted.tolist()


async def test_a_request_that_brings_its_own_prompt_asks_for_all_rows_and_the_kept_ones_stay() -> None:
    """With images, the engine may make more tokens of the prompt than are sent."""
    with Loopback() as engine:
        async with client_of(engine) as client:
            sample = Sample(tokens=[*PROMPT])
            await reach(client, sample, 9)
            assert sample.rollout_routed_experts is not None
            sample.rollout_routed_experts[:] = 15
            await reach(client, sample, 12, extra=lambda: {"input_ids": sample.tokens, "image_data": []})
        assert requested_starts(engine) == [0, 0]
        wanted = undisturbed_rows(engine, PROMPT, params_of(12))
    kept = len(PROMPT) + 9 - 1
    assert rows_of(sample) == [[[15, 15]] * 4] * kept + wanted[kept:]


@each_kind
async def test_a_sample_that_starts_again_asks_from_where_it_does(kind: Any) -> None:
    with Loopback() as engine:
        wanted = undisturbed_rows(engine, PROMPT, params_of(12))
        async with client_of(engine) as client:
            sample = kind(tokens=[*PROMPT])
            await reach(client, sample, 6)
            await reach(client, sample, 9)
            rewind(sample, 5, 0)
            await reach(client, sample, 12)
            assert rows_of(sample) == wanted
            restart(sample)
            await reach(client, sample, 12)
            assert rows_of(sample) == wanted
        prompt = len(PROMPT)
        assert requested_starts(engine) == [0, prompt + 5, prompt + 4, 0]


async def test_rows_that_are_neither_all_nor_the_new_ones_are_an_error_and_those_kept_stay() -> None:
    rows = np.full((5, 1, 1), 7, np.uint8)
    body = event([9], 1, "stop", prompt_tokens=6, routed_experts="AAAA")  # 3 rows
    sample = Sample(
        tokens=[*PROMPT, 8, 8], response_length=2, rollout_log_probs=[-1.0, -1.0], rollout_routed_experts=rows
    )
    sample.status = Sample.Status.ABORTED
    message = r"found 3 bytes, expected 1 numbers .*: 1 rows .*, or all 6,"
    async with (
        Replay(stream(body, DONE)) as server,
        Client(server.url, experts=Experts(1, 1, 16, "uint8"), retries=SOON) as client,
    ):
        with pytest.raises(DecodeError, match=message) as caught:
            await complete(client, sample, params_of(4), resume="raise")
    assert caught.value.kind == "metadata"
    assert sample.rollout_routed_experts is rows
    with pytest.raises(ValueError, match=r"shape \(3, 1, 1\), but 6 rows \(tokens - 1\) are needed, and 5 are kept"):
        merge(sample, Generation([9], [-1.0], finish_reason="stop", routed_experts=rows[:3]))
    assert sample.rollout_routed_experts is rows


def test_hosts_that_know_the_start_get_the_new_rows_alone_and_others_all() -> None:
    assert [adds_rows(kind) for kind in KINDS] == [True, True, False, True]


@pytest.mark.parametrize("kind", [Sample, NewHost])
def test_the_rows_kept_are_copied_at_most_once(kind: Any) -> None:
    tokens, more, width = 4000, 100, 1000
    kept, new = (np.zeros((n, width, 1), np.int32) for n in (tokens - 1, more))
    args = nowhere(num_layers=width, moe_router_topk=1, num_experts=16)
    sample = kind(tokens=[1] * tokens, rollout_routed_experts=kept)
    generation = Generation([2] * more, [-1.0] * more, finish_reason="abort", routed_experts=new)
    adds_rows(kind)
    tracemalloc.start()
    try:
        merge(sample, generation, args)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_rows(sample) == tokens + more - 1
    assert peak < kept.nbytes + 2 * new.nbytes


def test_a_list_of_rows_that_samples_share_is_not_changed() -> None:
    parts = [np.zeros((n, 1, 1), np.int32) for n in (2, 1)]
    args = nowhere(num_layers=1, moe_router_topk=1, num_experts=16)
    samples: list[Any] = [NewHost(tokens=[1] * 4) for _ in range(2)]
    for sample in samples:
        sample.rollout_routed_experts = parts
    merge(samples[0], Generation([2], [-1.0], finish_reason="abort", routed_experts=parts[1]), args)
    assert (len(parts), kept_rows(samples[0]), kept_rows(samples[1])) == (2, 4, 3)


@pytest.mark.parametrize(("start", "rows"), [(-1, 5), (4, 1), (2, 3), (2, 1)])
def test_our_sample_refuses_rows_that_do_not_start_among_those_kept_or_do_not_end_with_its_tokens(
    start: int, rows: int
) -> None:
    kept = np.zeros((3, 1, 1), np.int32)
    sample = Sample(tokens=[1] * 4, rollout_routed_experts=kept)
    meta = {"routed_experts": np.zeros((rows, 1, 1), np.int32), "routed_experts_start_len": start}
    with pytest.raises(ValueError, match="experts"):
        sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info=meta)
    assert sample.rollout_routed_experts is kept
    assert sample.tokens == [1] * 4
