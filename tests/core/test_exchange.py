"""The exchange and the head of its request, before any socket: what is refused, and what is there from the start."""

from __future__ import annotations

import gc
import math
import sys

import pytest

from streamfold._core import Exchange, RequestHead

HEAD = RequestHead("POST", "/generate", "engine:30000", [("Content-Type", "application/json")])


@pytest.mark.parametrize(
    ("method", "target", "host", "fields", "named"),
    [
        ("PUT", "/", "a", [], "PUT"),
        ("POST", "generate", "a", [], "generate"),
        ("POST", "/a b", "a", [], "/a b"),
        ("POST", "/", "a/b", [], "a/b"),
        ("POST", "/", "a", [("X A", "1")], "X A"),
        ("POST", "/", "a", [("X-A", "a\r\nX-B: b")], "X-A"),
        ("POST", "/", "a", [("X-A", "日本")], "X-A"),
        ("POST", "/", "a", [("transfer-encoding", "chunked")], "Transfer-Encoding"),
    ],
)
def test_a_head_that_can_not_be_sent_is_refused_by_name(
    method: str, target: str, host: str, fields: list[tuple[str, str]], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        RequestHead(method, target, host, fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["Content-Length", "Transfer-Encoding", "Connection", "Host", "Expect", "Upgrade", "TE", "Trailer", "", "a:"],
)
def test_a_field_that_is_reserved_or_no_token_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name or "token"):
        RequestHead.check_field(name, "a")
    with pytest.raises(ValueError, match=f"(?i){name}"):
        RequestHead.check_field(name.upper(), "a")


def test_a_field_may_hold_all_of_latin_1_but_control_characters() -> None:
    RequestHead.check_field("X-Name", "".join(map(chr, [*range(32, 127), *range(128, 256)])))
    for code in (*range(32), 127):
        with pytest.raises(ValueError, match="X-Name"):
            RequestHead.check_field("X-Name", chr(code))


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"dialect": "tgi"}, "dialect"),
        ({"clamped": "drop"}, "clamped"),
        ({"prompt_len": -1}, "prompt_len"),
        ({"max_event_bytes": -1}, "max_event_bytes"),
    ],
)
def test_the_keywords_of_a_stream_are_checked_as_the_parsers_are(keywords: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Exchange.stream(HEAD, b"{}", **{"dialect": "sglang", **keywords})  # type: ignore[arg-type]


def test_a_negative_limit_of_a_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        Exchange.reply(HEAD, b"", max_bytes=-1)


@pytest.mark.parametrize("exchange", [Exchange.stream(HEAD, b"{}", "sglang"), Exchange.reply(HEAD, b"{}", max_bytes=9)])
def test_an_exchange_that_has_not_begun_holds_nothing(exchange: Exchange) -> None:
    assert (exchange.token_count, exchange.first_token_at, exchange.last_token_at) == (0, math.inf, math.inf)
    assert 0 < exchange.held_bytes < 4096
    assert len(exchange.take().token_ids) == 0
    assert exchange.take_body() == b""


def test_a_body_is_held_without_a_copy_and_freed_with_its_exchange() -> None:
    body = bytes(1 << 20)
    before = sys.getrefcount(body)
    exchange = Exchange.stream(HEAD, body, "vllm")
    assert sys.getrefcount(body) > before
    assert exchange.held_bytes < 4096
    del exchange
    gc.collect()
    assert sys.getrefcount(body) == before
