"""The requests of the integrations, and when none may be sent."""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import slime, vime
from streamfold.integrations.settings import Settings
from streamfold.loopback import Loopback
from streamfold.samples.reset import restart
from support.host import engine, installed
from support.host.slime.observability import trace_utils
from support.host.slime.observability.trace_utils import spans
from support.host.slime.rollout import sglang_rollout
from support.host.slime.rollout.sglang_rollout import GenerateState, generate_and_rm
from support.host.slime.utils.processing_utils import IMAGE_TOKENS
from support.host.slime.utils.types import Sample
from support.host_calls import (
    HOSTS,
    PARAMS,
    TEXT,
    TOP_P,
    Server,
    Status,
    ask,
    assert_undisturbed,
    event,
    partial,
    sample_of,
    sent_request,
    streaming,
    whole,
)
from support.replay import DONE, PROMPT, stream, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

BOTH_LOOPS = True


@pytest.fixture(params=[(name, new) for name in HOSTS for new in (True, False)], ids=str)
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    name, new = request.param
    with installed(name, new=new):
        yield


@pytest.fixture(params=HOSTS)
def newer(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


@pytest.fixture(params=[True, False], ids=["newer", "older"])
def slimes(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed("slime", new=request.param):
        yield


@pytest.mark.parametrize("module", [slime, vime], ids=HOSTS)
def test_the_trainer_finds_a_generator_that_it_may_cancel(module: ModuleType) -> None:
    assert inspect.iscoroutinefunction(module.generate_streaming)
    assert vars(module.generate_streaming)["abort_mode"] == "request"
    assert list(inspect.signature(module.generate_streaming).parameters) == [
        *("args", "sample", "sampling_params", "evaluation")
    ]


async def test_a_first_request_has_the_prompts_ids_and_every_option_that_is_set(slimes: None) -> None:
    with Loopback(stop_probability=0) as engine:
        args = streaming(engine, use_rollout_routing_replay=True, router_policy="consistent_hashing")
        params = {"max_new_tokens": 8, "temperature": 1.0, **TOP_P}
        given = copy.deepcopy(params)
        sample = await ask(args, Sample(prompt=TEXT, session_id="mine"), params)
        (request,) = engine.seen()
        assert_undisturbed(engine, args, sample, params)
    body = request.json()
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": engine.tokenizer.encode(TEXT),
        "sampling_params": given,
        "stream": True,
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_dtype": "uint8",
    }
    assert request.headers["x-smg-routing-key"] == "mine"
    assert params == given
    assert sample.status is Status.TRUNCATED
    assert sample.weight_versions == ["default"]
    assert sample.prefix_cache_info.total_prompt_tokens == 2


async def test_ids_that_the_trainer_keeps_are_copied(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list(PROMPT)
    monkeypatch.setattr(sglang_rollout, "_prepare_prompt_ids", lambda *_: kept)
    async with Server(stream(event([], 0, "abort"), DONE)) as server:
        sample = await ask(streaming(server), Sample(prompt="x"))
    assert sample.tokens == kept
    assert sample.tokens is not kept
    sample = await ask(streaming(server), Sample(prompt="x"), {"max_new_tokens": 0})
    assert sample.tokens == kept
    assert sample.tokens is not kept


@pytest.mark.parametrize(
    ("policy", "session", "is_sent"),
    [("the host's", "mine", True), ("the host's", None, False), ("round_robin", "mine", False), (None, "mine", False)],
)
async def test_without_a_session_or_that_policy_there_is_no_routing_key(
    newer: None, policy: str | None, session: str | None, is_sent: bool
) -> None:
    name, header = engine.current().session
    async with Server(whole()) as server:
        await ask(
            streaming(server, router_policy=name if policy == "the host's" else policy), sample_of(session_id=session)
        )
    assert server.generates[0].headers.get(header.lower()) == (session if is_sent else None)


async def test_further_keys_of_the_settings_are_in_every_request_and_its_resumes(
    newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMFOLD_EXTRA", '{"cache_salt": "variable"}')
    extra = {"priority": 3, "cache_salt": "mine"}
    async with Server(whole()) as server:
        args = streaming(server, streamfold_extra=extra)
        await ask(args, sample_of())
        args.streamfold_extra = {**extra, "priority": 4}
        await ask(args, sample_of())
        del args.streamfold_extra
        await ask(args, sample_of())
    sent = [(request.json.get("priority"), request.json["cache_salt"]) for request in server.generates]
    assert sent == [(3, "mine"), (4, "mine"), (None, "variable")]


async def test_a_key_that_belongs_to_the_client_is_refused_before_any_request(newer: None) -> None:
    async with Server(whole()) as server:
        with pytest.raises(ValueError, match="extra must not hold stream"):
            await ask(streaming(server, streamfold_extra={"stream": False}), sample_of())
        assert server.requests == []


@pytest.mark.parametrize(("count", "dtype"), [(16, "uint8"), (256, "uint8"), (257, None), (None, None)])
async def test_experts_are_requested_as_uint8_where_they_fit(
    slimes: None, count: int | None, dtype: str | None
) -> None:
    with Loopback(num_experts=count or 16, stop_probability=0) as engine:
        args = streaming(engine, use_rollout_routing_replay=True)
        args.num_experts = count
        params = {"max_new_tokens": 4}
        sample = await ask(args, Sample(prompt=TEXT), params)
        assert engine.seen()[0].json().get("routed_experts_dtype") == dtype
        assert_undisturbed(engine, args, sample, params)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.dtype == "int32"
    assert sample.rollout_routed_experts.shape == (5, args.num_layers, args.moe_router_topk)


# The budget (THUDM/slime#2260, verl-project/verl#7207, THUDM/slime#92, verl-project/verl#6364).


@pytest.mark.parametrize(("done", "left"), [(0, 8), (1, 7), (5, 3), (7, 1)])
async def test_a_resumed_request_has_all_tokens_as_its_prompt_and_the_rest_of_the_budget(
    newer: None, done: int, left: int
) -> None:
    reply = [event([20], 1, "length", prompt_tokens=3 + done)]
    params = {"max_new_tokens": 8}
    async with Server(stream(*reply, DONE)) as server:
        sample = await ask(streaming(server), partial(*range(1, done + 1)), params)
    (request,) = map(sent_request, server.generates)
    assert request.budget == left
    assert request.ids == [*PROMPT, *range(1, done + 1)]
    assert params == {"max_new_tokens": 8}
    assert sample.tokens == [*PROMPT, *range(1, done + 1), 20]
    assert sample.status is Status.TRUNCATED


@pytest.mark.parametrize("tokens", [(), (1, 2, 3, 4)], ids=["from the start", "used up"])
async def test_without_a_budget_nothing_is_requested_and_the_sample_is_truncated(
    newer: None, tokens: tuple[int]
) -> None:
    async with Server(whole()) as server:
        sample = partial(*tokens)
        before = vars(sample) | {"status": Status.TRUNCATED}
        await ask(streaming(server), sample, {"max_new_tokens": len(tokens)})
        assert server.requests == []
    sample.metadata.pop("streamfold_written", None)
    assert vars(sample) == before


async def test_a_response_with_more_tokens_than_the_budget_is_truncated(newer: None) -> None:
    sample = partial(1, 2, 3)
    async with Server(whole()) as server:
        await ask(streaming(server), sample, {"max_new_tokens": 2})
        assert (sample.tokens, sample.status, server.requests) == ([*PROMPT, 1, 2, 3], Status.TRUNCATED, [])


async def test_siblings_share_their_parameters_and_none_changes_them(newer: None) -> None:
    shared: dict[str, Any] = {"max_new_tokens": 9, "custom_params": {"a": 1}, "stop": ["x"]}
    given = copy.deepcopy(shared)
    async with Server(
        lambda request: stream(event([20], 1, "stop", prompt_tokens=len(sent_request(request).ids)))
    ) as s:
        siblings = [partial(*range(n)) for n in range(4)]
        await asyncio.gather(*(ask(streaming(s), sample, shared) for sample in siblings))
    assert sorted(sent_request(request).budget or 0 for request in s.generates) == [6, 7, 8, 9]
    assert shared == given


async def test_min_new_tokens_counts_the_whole_response_too(newer: None) -> None:
    async with Server(stream(event([20], 1, "stop", prompt_tokens=5))) as server:
        await ask(streaming(server), partial(1, 2), {"max_new_tokens": 9, "min_new_tokens": 6})
        await ask(streaming(server), partial(1, 2), {"max_new_tokens": 9, "min_new_tokens": 1})
    least = "min_new_tokens" if engine.current().name == "sglang" else "min_tokens"
    assert [sent_request(request).params[least] for request in server.generates] == [4, 0]
    assert [sent_request(request).budget for request in server.generates] == [7, 7]


# What is refused before any request.


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"use_score_centering": True}, {}, "use_score_centering .* streaming"),
        ({"ci_test": True}, {"prompt": [{"role": "user", "content": "x"}]}, "must be a str, not list"),
        ({}, {"status": Status.COMPLETED}, "the sample is COMPLETED"),
        ({}, {"status": Status.TRUNCATED}, "the sample is TRUNCATED"),
        ({}, {"status": Status.FAILED}, "the sample is FAILED"),
        ({}, {"loss_mask": [1]}, "loss_mask has 1 entries, but response_length is 0"),
        ({"use_rollout_routing_replay": True, "num_layers": None}, {}, "num_layers"),
        ({"model_routers": {"a": ("h", 1)}, "streamfold_model": "b"}, {}, "no router for the model 'b'.* has a"),
        ({"streamfold_concurrency": "many"}, {}, "streamfold_concurrency must be a whole number, 1 or more; not .many"),
        ({"streamfold_concurrency": None}, {}, "streamfold_concurrency must be .* not None"),
        (
            {"streamfold_timeout_first_token": -1},
            {},
            "streamfold_timeout_first_token must be a number of seconds, 0 or more, or none; not -1",
        ),
    ],
)
async def test_what_cannot_succeed_is_refused_before_any_request(
    newer: None, settings: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    if "model_routers" in settings:
        settings = {f"{engine.current().name}_model_routers": settings["model_routers"], **settings}
    async with Server(whole()) as server:
        sample = sample_of(**fields)
        before = dict(vars(sample))
        with pytest.raises(ValueError, match=message):
            await ask(streaming(server, **settings), sample)
        assert server.requests == []
    assert vars(sample) == before


@pytest.mark.parametrize("name", ["rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_top_p_log_probs"])
async def test_what_score_centering_has_written_is_kept_and_not_continued(newer: None, name: str) -> None:
    scores = np.zeros((2, 4), np.float32)
    async with Server(whole()) as server:
        sample = partial(1, 2, **{name: scores})
        before = dict(vars(sample))
        with pytest.raises(ValueError, match=f"the response has {name}, which streaming does not carry"):
            await ask(streaming(server), sample)
        assert server.requests == []
    assert vars(sample) == before
    assert getattr(sample, name) is scores
    rolled_back = partial(1, 2, **{name: scores})
    restart(rolled_back)
    assert getattr(rolled_back, name) is None, "it is of the response that is dropped"


async def test_keys_of_custom_params_that_streamfold_does_not_know_are_sent(slimes: None) -> None:
    params = {"max_new_tokens": 8, "custom_params": {"return_top_p_log_probs": True, "mine": 1}}
    async with Server(whole()) as server:
        await ask(streaming(server), sample_of(), params)
    assert server.generates[0].json["sampling_params"] == params


def test_samples_of_a_slime_that_is_too_old_are_refused_with_the_release_that_is_needed(slimes: None) -> None:
    sample = SimpleNamespace(status=Status.PENDING, prompt="x", tokens=[1], response_length=0, metadata={})
    with pytest.raises(
        ValueError, match=r"this slime have no append_response_tokens: slime 0\.3\.1 or newer is needed"
    ):
        asyncio.run(slime.generate_streaming(SimpleNamespace(), sample, PARAMS))


async def test_top_p_ids_cannot_begin_in_the_middle_of_a_response(slimes: None) -> None:
    async with Server(whole()) as server:
        with pytest.raises(ValueError, match="1 response tokens lack top-p ids, but the next ones have them"):
            await ask(streaming(server), partial(1), TOP_P)
        assert server.requests == []


async def test_no_request_leaves_while_the_trainer_is_aborting(host: None) -> None:
    async with Server(whole()) as server:
        args = streaming(server)
        GenerateState(args).aborted = True
        assert (await ask(args, sample_of())).status is Status.ABORTED
        assert server.requests == []


async def test_calls_that_wait_for_a_slot_do_not_start_once_the_trainer_aborts(host: None) -> None:
    """Older slime aborts whole servers, which do not know these calls, and waits until they have ended."""
    release = asyncio.Event()
    reply = whole()
    running = [*reply[:2], release, *reply[2:]]
    async with Server(running) as server:
        args = streaming(server, streamfold_concurrency=1)
        tasks = [asyncio.create_task(ask(args, sample_of())) for _ in range(3)]
        await until(lambda: server.generates)
        GenerateState(args).aborted = True
        release.set()
        samples = await asyncio.gather(*tasks)
    assert len(server.generates) == 1
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.ABORTED, Status.ABORTED]


# Routers.


async def test_a_named_model_is_requested_from_its_own_router(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(whole()) as first, Server(whole()) as second, Server(whole()) as usual:
        routers = {"first": ("127.0.0.1", first.port), "second": ("127.0.0.1", second.port)}
        args = streaming(usual, **{f"{engine.current().name}_model_routers": routers})
        await ask(args, sample_of())
        assert (len(usual.generates), len(first.generates), len(second.generates)) == (1, 0, 0)
        await ask(args, sample_of(metadata={"model_name": "second"}))
        assert (len(usual.generates), len(first.generates), len(second.generates)) == (1, 0, 1)
        monkeypatch.setenv("STREAMFOLD_MODEL", "first")
        await ask(args, sample_of())
        assert (len(usual.generates), len(first.generates), len(second.generates)) == (1, 1, 1)


@pytest.mark.parametrize("name", ["a teacher", 7, ["first"], None])
async def test_a_model_name_of_the_dataset_that_no_router_has_is_no_error(
    newer: None, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own ``get_model_url`` takes the default router."""
    async with Server(whole()) as first, Server(whole()) as usual:
        args = streaming(usual, **{f"{engine.current().name}_model_routers": {"first": ("127.0.0.1", first.port)}})
        assert (await ask(args, sample_of(metadata={"model_name": name}))).status is Status.COMPLETED
        assert (len(usual.generates), len(first.generates)) == (1, 0)
        monkeypatch.setenv("STREAMFOLD_MODEL", "first")
        await ask(args, sample_of(metadata={"model_name": name}))
        assert (len(usual.generates), len(first.generates)) == (1, 1)


async def test_a_router_may_have_an_ipv6_address(newer: None) -> None:
    async with Server(whole(), host="::1") as server:
        args = streaming(server)
        setattr(args, f"{engine.current().name}_router_ip", "::1")
        assert (await ask(args, sample_of())).status is Status.COMPLETED


# Images.


@pytest.mark.parametrize("replay", [True, False], ids=["experts", "no experts"])
async def test_images_are_sent_with_the_text_first_and_with_all_ids_on_a_resume(slimes: None, replay: bool) -> None:
    with Loopback(stop_probability=0, incremental=True) as engine:
        args = streaming(engine, use_rollout_routing_replay=replay)
        args.hf_checkpoint = f"loopback-vl/{engine.config.vocab_size}"
        sample = Sample(prompt=TEXT, multimodal_inputs={"images": [b"png", b"png"]})
        prompt = [engine.tokenizer.image_token_id] * (2 * IMAGE_TOKENS) + engine.tokenizer.encode(TEXT)
        await ask(args, sample, {"max_new_tokens": 5})
        sample.status = Status.ABORTED  # as if it had been aborted there
        await ask(args, sample, {"max_new_tokens": 12})
        first, later = (request.json() for request in engine.seen())
        assert sample.tokens[: len(prompt)] == prompt
        assert_undisturbed(engine, args, sample, {"max_new_tokens": 12})
    assert (first["text"], first.get("input_ids")) == (TEXT, None)
    assert (later["input_ids"], later.get("text")) == (sample.tokens[: len(prompt) + 5], None)
    assert first["image_data"] == later["image_data"] == ["data:image/png;base64,cG5n"] * 2


async def test_images_need_a_text_prompt(newer: None) -> None:
    async with Server(whole()) as server:
        sample = sample_of(prompt=[{"role": "user"}], multimodal_inputs={"images": [b"png"]})
        with pytest.raises(ValueError, match="with images the prompt must be a str"):
            await ask(streaming(server), sample)
        assert server.requests == []


# Settings.


@pytest.mark.parametrize(
    ("settings", "variables", "wanted"),
    [
        ({}, {}, (10.0, 600.0, 300.0, 2.0)),
        ({}, {"STREAMFOLD_TIMEOUT_CONNECT": "3", "STREAMFOLD_DRAIN": "0.5"}, (3.0, 600.0, 300.0, 0.5)),
        ({"streamfold_timeout_connect": 4}, {"STREAMFOLD_TIMEOUT_CONNECT": "3"}, (4.0, 600.0, 300.0, 2.0)),
        ({"streamfold_timeout_first_token": None}, {"STREAMFOLD_TIMEOUT_NEXT_TOKEN": "None"}, (10.0, None, None, 2.0)),
    ],
)
def test_attributes_take_precedence_over_variables_and_both_over_the_defaults(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], variables: dict[str, str], wanted: tuple[Any, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = type("Args", (), settings)()
    found = Settings.of(args).timeouts
    assert (found.connect, found.first_token, found.next_token, found.drain) == wanted


async def test_an_event_longer_than_max_event_bytes_is_an_error(newer: None) -> None:
    async with Server(whole()) as server:
        with pytest.raises(ValueError, match="64 bytes"):
            await ask(streaming(server, streamfold_max_event_bytes=64), sample_of())


# Spans.


async def test_each_call_is_a_span_of_the_trainer(host: None) -> None:
    async with Server(whole()) as server:
        sample = await ask(streaming(server), sample_of(), {"max_new_tokens": 8})
    (span,) = spans
    assert span.target is sample
    assert span.closed
    assert span.error is None
    assert span.attrs["max_new_tokens"] == 8
    assert span.attrs["completion_tokens"] == 3
    assert span.attrs["finish_reason"] == "stop"
    assert span.attrs["id"] == ("r" if engine.current().name == "sglang" else "generate-tokens-r7")
    assert span.name == f"{engine.current().name}_generate"


async def test_a_trainer_without_spans_works(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(whole()) as server:
        with monkeypatch.context() as patch:
            for name in ("observability.trace_utils", "utils.trace_utils"):
                patch.setitem(sys.modules, f"{engine.current().package}.{name}", None)
            assert (await ask(streaming(server), sample_of())).status is Status.COMPLETED
    assert spans == []


async def test_span_helpers_that_are_missing_or_fail_cost_no_sample(
    newer: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    builder = f"build_{engine.current().name}_meta_trace_attrs"
    async with Server(whole()) as server:
        for name, helper in ((builder, lambda meta: meta["unheard of"]), (builder, None), ("trace_span", None)):
            monkeypatch.setattr(trace_utils, name, helper)
            sample = await ask(streaming(server), sample_of())
            assert (sample.status, sample.response_length) == (Status.COMPLETED, 3)
    assert [span.name for span in spans] == [f"{engine.current().name}_generate"] * 2
    assert "could not be added" in caplog.text


@pytest.mark.parametrize("eos", [9, [8, 9], None])
async def test_a_tokenizer_may_have_one_eos_several_or_none(newer: None, eos: Any) -> None:
    async with Server(stream(event([20], 1, "stop", prompt_tokens=5), DONE)) as server:
        args = streaming(server)
        GenerateState(args).tokenizer.eos_token_id = eos
        sample = await ask(args, partial(1, 9))
        assert len(server.generates) == (eos is None)
    assert sample.status is Status.COMPLETED


async def test_an_evaluation_is_requested_like_a_rollout(host: None) -> None:
    async with Server(whole()) as server:
        args = streaming(server)
        samples = [
            await generate_and_rm(args, sample_of(), PARAMS, evaluation=evaluation) for evaluation in (True, False)
        ]
    bodies = [{**request.json, "rid": None, "request_id": None} for request in server.generates]
    assert bodies[0] == bodies[1]
    assert [sample.reward for sample in samples] == [1.0, 1.0]
