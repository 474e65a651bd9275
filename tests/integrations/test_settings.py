"""Settings: attributes of a trainer's arguments, environment variables, defaults, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamfold import EngineError, Limits, Retries, RolloutConfig, Timeouts
from streamfold.integrations.clients import client_handle
from streamfold.integrations.settings import SETTINGS, Settings
from streamfold.loopback import Loopback


def read(**attributes: Any) -> Settings:
    return Settings.of(SimpleNamespace(**{f"streamfold_{name}": value for name, value in attributes.items()}))


def test_the_defaults_are_those_of_the_objects_that_are_configured() -> None:
    settings = read()
    assert settings == Settings()
    assert (settings.timeouts, settings.limits, settings.retries) == (Timeouts(), Limits(), Retries())
    usual = RolloutConfig(groups=1)
    for name in (
        "keep_finished", "max_staleness", "stale", "abort_seconds", "reward_seconds", "sample_seconds",
        "sample_retries", "max_failures", "max_failure_rate", "group_tries", "max_groups_drawn",
    ):  # fmt: skip
        assert getattr(settings, name) == getattr(usual, name)


def test_an_attribute_takes_precedence_over_a_variable_and_both_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("STREAMFOLD_TRIES", "7")
    monkeypatch.setenv("STREAMFOLD_DRAIN", "0.5")
    assert read(drain=3) == replace(Settings(), tries=7, drain=3.0)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("resume", "raise", "raise"),
        ("tries", "3", 3),
        ("tries", 3.0, 3),
        ("tries", None, None),
        ("tries", "null", None),
        ("timeout_connect", "1.5", 1.5),
        ("timeout_connect", 0, 0.0),
        ("timeout_next_token", None, None),
        ("timeout_next_token", "None", None),
        ("max_staleness", "null", None),
        ("max_staleness", "", None),
        ("in_flight", "4", 4),
        ("max_failures", None, None),
        ("max_failure_rate", "0.5", 0.5),
        ("extra", '{"lora_path": "math", "priority": 3}', {"lora_path": "math", "priority": 3}),
        ("extra", {"cache_salt": "a"}, {"cache_salt": "a"}),
        ("extra", None, None),
        ("model", "actor", "actor"),
        ("api_key", "s3cret", "s3cret"),
        ("headers", {"X-Team": "a"}, {"X-Team": "a"}),
        ("headers", '{"X-Team": "a"}', {"X-Team": "a"}),
        ("headers", "none", None),
        ("keep_finished", False, False),
        ("keep_finished", "Off", False),
        ("keep_finished", "1", True),
    ],
)
def test_values_are_read_from_python_yaml_and_the_shell(
    name: str, given: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = getattr(read(**{name: given}), name)
    assert (found, type(found)) == (wanted, type(wanted))
    if isinstance(given, str):
        monkeypatch.setenv(f"STREAMFOLD_{name.upper()}", given)
        assert getattr(read(), name) == wanted


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("resume", "maybe", "must be one of continue, restart, raise; not 'maybe'"),
        ("resume", None, "must be one of continue, restart, raise; not None"),
        ("tries", 0, "must be a whole number, 1 or more, or none; not 0"),
        ("tries", True, "must be a whole number, 1 or more, or none; not True"),
        ("timeout_connect", 10**400, "must be a number of seconds, 0 or more, or none; not 10+"),
        ("tries", 60.9, "must be a whole number, 1 or more, or none; not 60.9"),
        ("tries", "60.9", "must be a whole number, 1 or more, or none; not '60.9'"),
        ("concurrency", Decimal("60.9"), r"must be a whole number, 1 or more; not Decimal\('60.9'\)"),
        ("concurrency", np.float32(60.9), r"must be a whole number, 1 or more; not .*60.9\)?"),
        ("max_failures", Fraction(1, 2), r"must be a whole number, 0 or more, or none; not Fraction\(1, 2\)"),
        ("tries", [1], r"must be a whole number, 1 or more, or none; not \[1\]"),
        ("concurrency", None, "must be a whole number, 1 or more; not None"),
        ("timeout_connect", -1, "must be a number of seconds, 0 or more, or none; not -1"),
        ("timeout_connect", "inf", "must be a number of seconds, 0 or more, or none; not 'inf'"),
        ("max_failure_rate", "x", "must be a number, 0 or more, or none; not 'x'"),
        ("drain", "nan", "must be a number of seconds, 0 or more; not 'nan'"),
        ("drain", "none", "must be a number of seconds, 0 or more; not 'none'"),
        ("in_flight", 0, "must be a whole number, 1 or more, or none; not 0"),
        ("model", 3, "must be a name, or none; not 3"),
        ("api_key", 3, "must be a text, or none; not a int"),
        ("headers", "s3cret", "must be an object of names and texts, or none; not a str"),
        ("headers", {"X-Team": 3}, "must be an object of names and texts, or none; not a dict"),
        ("headers", ["X-Team"], "must be an object of names and texts, or none; not a list"),
        ("extra", "{", "must be a JSON object of request keys, none of .*text, .*or none; not '{'"),
        ("extra", "[1]", "must be a JSON object of request keys, .*; not '.1.'"),
        ("extra", '{"text": "x"}', "must be a JSON object of request keys, none of .*text, .*"),
        ("extra", {"input_ids": [1]}, "must be a JSON object of request keys, none of input_ids, .*"),
        ("extra", True, "must be a JSON object of request keys, .*; not True"),
        ("keep_finished", "perhaps", "must be true or false; not 'perhaps'"),
        ("keep_finished", None, "must be true or false; not None"),
    ],
)
def test_an_invalid_value_is_refused_by_the_name_under_which_it_was_given(
    name: str, given: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"^streamfold_{name} {message}$"):
        read(**{name: given})
    if isinstance(given, str):
        monkeypatch.setenv(f"STREAMFOLD_{name.upper()}", given)
        with pytest.raises(ValueError, match=f"^STREAMFOLD_{name.upper()} {message}$"):
            read()


async def test_key_and_headers_are_sent_with_every_request_and_are_part_of_no_message() -> None:
    settings = read(api_key="s3cret", headers={"X-Team": "hidden"})
    assert not {"s3cret", "hidden"} & set(re.findall(r"\w+", repr(settings)))
    with Loopback(api_key="s3cret") as engine:
        handle = await client_handle("sglang", engine.url, settings)
        other = await client_handle("sglang", engine.url, read(api_key="another"))
        assert other is not handle
        assert await client_handle("sglang", engine.url, read(api_key="s3cret", headers={"X-Team": "hidden"})) is handle
        assert len((await handle.client.generate([300], {"max_new_tokens": 3, "ignore_eos": True})).token_ids) == 3
        assert await handle.client.abort_engines(10)
        with pytest.raises(EngineError, match="401"):
            await other.client.generate([300], {"max_new_tokens": 3})
        sent = [seen.headers for seen in engine.seen() if seen.headers.get("authorization") == "Bearer s3cret"]
    assert len(sent) >= 2
    assert {headers.get("x-team") for headers in sent} == {"hidden"}
    expected = {"Authorization": "Bearer s3cret", "X-Team": "hidden"}
    assert settings.sent_headers == expected


async def test_a_header_that_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Content-Length"):
        await client_handle("sglang", "http://127.0.0.1:9", read(headers={"Content-Length": "3"}))
