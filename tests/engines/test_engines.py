"""What is sent to an engine, and what is understood of its small replies."""

from __future__ import annotations

import email.utils
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import orjson
import pytest

from streamfold import Client, EngineError, Experts
from streamfold.client.responses import error_message, retry_after
from streamfold.client.urls import normalize_base_url
from streamfold.engines.base import RequestOptions, common_extra
from streamfold.engines.sglang import Sglang
from streamfold.engines.token_ids import token_array
from streamfold.integrations.base import router_url

ENGINE = Sglang()


def payload(sampling_params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    ids = np.array([1, 2, 3], np.int32)
    return ENGINE.payload(more.pop("input_ids", ids), sampling_params or {}, RequestOptions(**{"rid": "r", **more}))


# The request.


def test_a_plain_request_holds_just_what_was_asked_for() -> None:
    asked = payload({"max_new_tokens": 5})
    assert asked.pop("input_ids").tolist() == [1, 2, 3]
    assert asked == {"rid": "r", "sampling_params": {"max_new_tokens": 5}, "stream": True, "return_logprob": True}


def test_top_p_replay_is_asked_for_without_touching_the_callers_dict() -> None:
    custom = {"mine": 1}
    params = {"custom_params": custom}
    asked = payload(params, top_p=True)
    assert asked["sampling_params"]["custom_params"] == {"mine": 1, "return_top_p_token_ids": True}
    assert params == {"custom_params": {"mine": 1}}
    assert params["custom_params"] is custom
    assert payload({"custom_params": None}, top_p=True)["sampling_params"]["custom_params"] == {
        "return_top_p_token_ids": True
    }


@pytest.mark.parametrize(
    ("experts", "start", "told"),
    [
        (None, 0, {}),
        (Experts(2, 1), 0, {"return_routed_experts": True}),
        (Experts(2, 1), 2, {"return_routed_experts": True, "routed_experts_start_len": 2}),
        (Experts(2, 1, dtype="uint8"), 0, {"return_routed_experts": True, "routed_experts_dtype": "uint8"}),
    ],
)
def test_routed_experts_are_asked_for_with_dtype_and_start_only_where_they_differ(
    experts: Experts | None, start: int, told: dict[str, Any]
) -> None:
    asked = payload(experts=experts, experts_start=start)
    assert {key: value for key, value in asked.items() if "experts" in key} == told


def test_extras_are_added_and_never_replace_what_an_argument_sets() -> None:
    assert payload(extra={"priority": 3})["priority"] == 3
    assert payload(input_ids=None, extra={"input_ids": [5], "image_data": "x"})["input_ids"] == [5]
    with pytest.raises(ValueError, match="rid, stream: use the argument"):
        payload(extra={"stream": False, "rid": "mine", "priority": 3})


@pytest.mark.parametrize("extra", [None, {}, {"priority": 1, "return_hidden_states": True}, {"text": None}])
def test_a_request_without_a_prompt_is_refused(extra: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match=r"no prompt: pass input_ids, or text .* in extra"):
        payload(input_ids=None, extra=extra)


@pytest.mark.parametrize("key", ["text", "input_ids", "input_embeds", "image_data", "session_params", "a_new_one"])
def test_a_key_that_may_hold_a_prompt_is_left_to_the_engine(key: str) -> None:
    assert payload(input_ids=None, extra={key: [[0.5]], "priority": 1})[key] == [[0.5]]


def test_a_sampling_parameter_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        payload({"temperature": float("nan")})


@pytest.mark.parametrize(
    ("asked", "drains"),
    [
        ({}, False),
        ({"top_p": True}, True),
        ({"experts": Experts(2, 1)}, True),
        ({"extra": {"return_routed_experts": True}}, True),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, True),
        ({"sampling_params": {"custom_params": {"other": True}}}, False),
        ({"sampling_params": {"custom_params": None}}, False),
    ],
)
def test_side_data_counts_as_asked_for_whichever_way_it_was(asked: dict[str, Any], *, drains: bool) -> None:
    assert ENGINE.asks_side_data(payload(**asked)) is drains


@pytest.mark.parametrize(
    ("params", "budget"),
    [({}, None), ({"max_new_tokens": None}, None), ({"max_new_tokens": np.int64(7)}, 7), ({"max_new_tokens": 0}, 0)],
)
def test_the_budget_is_read_from_max_new_tokens(params: dict[str, Any], budget: int | None) -> None:
    assert ENGINE.budget(params) == budget


@pytest.mark.parametrize(
    "params", [{"max_new_tokens": -1}, {"max_new_tokens": 1.5}, {"max_new_tokens": "8"}, {"n": 2}, {"n": 0}]
)
def test_a_budget_or_a_number_of_answers_that_makes_no_sense_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        ENGINE.budget(params)


@pytest.mark.parametrize(("old", "new"), [("a", "b"), ('say "a"', "é\n"), ("", "f" * 32)])
def test_another_request_id_takes_the_place_of_the_first_and_the_rest_stays_byte_for_byte(old: str, new: str) -> None:
    extra = {"text": f'{{"rid":"{old}"}}'}
    asked = payload({"stop": [old]}, input_ids=None, rid=old, extra=extra)
    body = orjson.dumps(asked)
    renamed = ENGINE.rename(body, old, new)
    assert orjson.loads(renamed) == {**asked, "rid": new}
    assert ENGINE.rename(renamed, new, old) == body
    with pytest.raises(ValueError, match="not the request"):
        ENGINE.rename(body, new, old)


# Token ids.


@pytest.mark.parametrize(
    "ids",
    [
        [0, 7, 2**31 - 1],
        (0, 7, 2**31 - 1),
        np.array([0, 7, 2**31 - 1], np.int64),
        np.array([0, 7, 2**31 - 1], np.uint32),
        np.array([0, 7, 2**31 - 1], ">i8"),
        np.array([0, 1, 7, 1, 2**31 - 1, 1])[::2],
    ],
)
def test_token_ids_may_come_as_any_row_of_integers(ids: Any) -> None:
    array = token_array(ids)
    assert array.tolist() == [0, 7, 2**31 - 1]
    assert array.dtype == np.int32
    assert array.flags.c_contiguous


def test_an_empty_prompt_is_an_empty_array() -> None:
    assert token_array([]).dtype == np.int32
    assert token_array([]).shape == (0,)


@pytest.mark.parametrize(
    "ids", [[-1], [2**31], [2**63], [2**70], [1.0], ["1"], [True], [[1, 2]], [None], np.array([[1]]), np.array([0.5])]
)
def test_what_is_no_row_of_token_ids_is_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        token_array(ids)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([*range(50), -1], "found -1 at index 50$"),
        (np.array([0, 2**31]), "found 2147483648 at index 1$"),
        ([*range(50), 2.5], "where index 50 is 2.5$"),
        ((*range(50), "a"), "where index 50 is 'a'$"),
        ([*range(50), None], "where index 50 is None$"),
        ([*range(50), 2**70], "where index 50 is 1180591620717411303424$"),
    ],
)
def test_the_message_says_which_value_of_a_long_prompt_is_no_token_id(ids: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^input_ids must .*{words}"):
        token_array(ids)


NOT_FINITE = [float("nan"), float("-inf"), np.float32("inf"), np.float64("nan")]


@pytest.mark.parametrize("value", NOT_FINITE, ids=repr)
def test_a_number_that_json_would_make_null_of_is_refused_wherever_it_stands(value: Any) -> None:
    for params in ({"temperature": value}, {"custom_params": {"a": {"b": value}}}):
        with pytest.raises(ValueError, match=r"^sampling_params\[.* is -?(nan|inf): JSON has no such number$"):
            payload(params)
    with pytest.raises(ValueError, match=r"^extra\['priority'\] is "):
        payload(extra={"priority": value})
    with pytest.raises(ValueError, match=r"^extra\['a'\]\['b'\] is "):
        common_extra({"a": {"b": value}})


# Addresses.


@pytest.mark.parametrize("host", ["::1", "[::1]", "2001:db8::1", "fe80::1%eth0", "::ffff:127.0.0.1"])
def test_a_routers_host_gets_its_brackets_once(host: str) -> None:
    """encode/httpx#1311."""
    assert (
        router_url(host, 30000) == normalize_base_url(router_url(host, 30000)) == f"http://[{host.strip('[]')}]:30000"
    )


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("http://h:1/api/", "http://h:1/api"),
        ("http://h:1/api", "http://h:1/api"),
        ("http://h:1//", "http://h:1"),
        ("http://h:1//a///b//", "http://h:1/a/b"),
        (" HTTP://H:1/API \n", "http://h:1/API"),
        ("https://h", "https://h"),
        ("h:30000", "http://h:30000"),
        ("10.0.0.1", "http://10.0.0.1"),
        ("::1", "http://[::1]"),
        ("[::1]", "http://[::1]"),
        ("[::1]:30000", "http://[::1]:30000"),
        ("http://::1:30000", "http://[::1]:30000"),
        ("http://[::1]:30000/api", "http://[::1]:30000/api"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]"),
        ("fe80::1%eth0:30000", "http://[fe80::1%eth0]:30000"),
        ("http://[fe80::1%25eth0]:30000", "http://[fe80::1%eth0]:30000"),
        ("::ffff:127.0.0.1", "http://[::ffff:127.0.0.1]"),
        ("::ffff:127.0.0.1:30000", "http://[::ffff:127.0.0.1]:30000"),
    ],
)
def test_an_address_has_one_normal_form_however_it_is_written(written: str, normal: str) -> None:
    assert normalize_base_url(written) == normal
    assert normalize_base_url(normal) == normal


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("http://h/?worker=1", "query string"),
        ("http://h/#top", "fragment"),
        ("ftp://h", "http or https"),
        ("", "no host"),
        ("http://", "no host"),
        ("/generate", "no host"),
        ("a b", "space"),
        ("http://h:port", "port"),
        ("http://h:65536", "port"),
        ("::1:8000", r"write http://\[::1:8000\] or http://\[::1\]:8000"),
    ],
)
def test_an_address_that_is_none_is_refused_with_a_hint(address: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        normalize_base_url(address)


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="api_key") as refused:
        normalize_base_url("http://me:hunter2@h")
    assert "hunter2" not in str(refused.value)


# Replies.


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"object":"error","message":"no such","type":"Bad Request","param":null,"code":400}', "no such"),
        (b'{"error":"unknown field `x`"}', "unknown field `x`"),
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"error":{"message":"validation failed","code":400}}', "validation failed"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body","rid"],"msg":"Field required"}]}', "Field required (['body', 'rid'])"),
        (b'"plain"', "plain"),
        (b"upstream connect error\n", "upstream connect error"),
        (b"<html>\n  <h1>502</h1>\n</html>", "<html> <h1>502</h1> </html>"),
        (b'{"code":1}', '{"code":1}'),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", "an empty reply"),
    ],
)
def test_the_servers_words_are_found_in_every_shape_of_an_error_body(body: bytes, message: str) -> None:
    assert error_message(body) == message


def test_a_long_error_page_is_cut_short() -> None:
    assert len(error_message(b"<html>" * 1000)) == 200
    assert len(error_message(b'{"error":"%b"}' % (b"x" * 10_000))) == 2000


@pytest.mark.parametrize(
    ("reply", "load"),
    [
        ({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 3}]}, 5),
        ({"loads": [{"num_reqs": 4}, {"num_reqs": 1}]}, 5),
        ({"loads": [{"num_total_reqs": 5, "num_reqs": 9, "num_running_reqs": 9, "num_waiting_reqs": 9}]}, 5),
        ([{"num_reqs": 5, "num_waiting_reqs": 2}], 5),
        ({"num_reqs": 5}, 5),
        ({"loads": []}, 0),
    ],
)
def test_the_load_is_what_runs_and_waits_in_every_shape_of_the_reply(reply: Any, load: int) -> None:
    assert ENGINE.read_load(orjson.dumps(reply)) == load


@pytest.mark.parametrize(
    "reply", [{}, {"loads": {}}, {"loads": [{"dp_rank": 0}]}, [1], "busy", None, {"num_reqs": "5"}]
)
def test_a_load_of_unknown_shape_is_an_error_and_not_idle(reply: Any) -> None:
    with pytest.raises(EngineError, match="unknown shape"):
        ENGINE.read_load(orjson.dumps(reply))


@pytest.mark.parametrize(
    ("reply", "workers"),
    [
        (
            {"workers": [{"id": "a", "url": "http://h:1"}, {"url": "http://h:2"}], "total": 2},
            ["http://h:1", "http://h:2"],
        ),
        ({"workers": [{"url": "http://h:1@0"}, {"url": "http://h:1@1"}]}, ["http://h:1"]),
        ({"workers": []}, []),
        ({"workers": [{"id": "a"}, {"url": ""}, {"url": None}, "http://h:3"]}, []),
        ({"workers": 2}, []),
        ({"detail": "Not Found"}, []),
        ([], []),
        (None, []),
    ],
)
def test_workers_are_read_from_a_routers_reply_and_from_nothing_else(reply: Any, workers: list[str]) -> None:
    assert ENGINE.read_workers(reply) == workers


DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": DATE}, 30.0),
        ({"retry-after": "Wednesday, 21-Oct-15 07:28:30 GMT", "date": DATE}, 30.0),
        ({"retry-after": "Wed Oct 21 07:28:30 2015", "date": DATE}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:27:00 GMT", "date": DATE}, 0.0),
        ({"retry-after": DATE}, 0.0),
        ({}, None),
        *[({"retry-after": text}, None) for text in ("", "soon", "-1", "1e5", "nan", "inf", "1" * 10, "1, 2", "Wed,")],
        *[({"retry-after": text}, None) for text in ("Wed, 99 Oct 2015 07:28:00 GMT", "21 Oct 99999 07:28:00 GMT")],
    ],
)
def test_a_wish_to_be_asked_later_is_read_in_seconds_or_as_a_date_by_the_servers_own_clock(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(headers) == seconds


def test_a_date_without_the_servers_clock_is_measured_by_ours() -> None:
    soon = email.utils.format_datetime(datetime.now(timezone.utc) + timedelta(seconds=100))
    seconds = retry_after({"retry-after": soon})
    assert seconds is not None
    assert 90 < seconds <= 100


def test_the_abort_of_all_names_no_request() -> None:
    assert ENGINE.aborts_all() == [("/abort_request", {"abort_all": True})]


@pytest.mark.parametrize(
    "key", ["", " ", "secret\n", " secret", "se\r\ncret: secret", "sécret", "secret\u2028", "secret\x7f"]
)
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ValueError, match="the API key is empty, or has") as refused:
        Client("http://127.0.0.1:9", api_key=key)
    assert "cret" not in str(refused.value)
