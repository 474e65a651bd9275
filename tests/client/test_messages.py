"""Arguments of a wrong kind: the message names the argument, what it got, and what to give instead."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Client, CompletionOptions, Retries, RolloutConfig, Sample, Timeouts, complete
from streamfold.client.observer import observed
from support.replay import ASKED, PROMPT, WHOLE, Replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.speaking import Speech

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ("Hi", TypeError, ["input_ids", "not the text 'Hi'", 'extra={"text": ...}']),
        (b"Hi", TypeError, ["input_ids", "b'Hi'"]),
        (CHAT, ValueError, ["input_ids", "the messages of a chat", "apply_chat_template"]),
        (CHAT[0], TypeError, ["input_ids", "the messages of a chat"]),
        (["Hi"], ValueError, ["input_ids", "not ['Hi']"]),
        ([None], ValueError, ["input_ids", "not [None]"]),
        (5, TypeError, ["input_ids", "not 5"]),
        (np.array(3), TypeError, ["input_ids", "array(3)"]),
        ([1.5], ValueError, ["input_ids", "float64"]),
        ([True], ValueError, ["input_ids", "bool"]),
        ([[1, 2], [3, 4]], ValueError, ["input_ids", "2 dimensions", "one call per prompt"]),
        ([[1, 2], [3]], ValueError, ["input_ids", "one call per prompt"]),
        ([1, -1], ValueError, ["input_ids", "found -1"]),
        ([2**31], ValueError, ["input_ids", str(2**31)]),
    ],
)
async def test_a_prompt_that_is_no_row_of_ids_is_refused_with_what_to_give(
    prompt: Any, kind: type[Exception], words: list[str]
) -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        with pytest.raises(kind) as refused:
            client.start(prompt, {"max_new_tokens": 8})
        assert [word for word in words if word not in str(refused.value)] == []
        assert (server.accepted, client.running) == (0, [])


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        ("timeouts", 5, "Timeouts(first_token=120)"),
        ("extra", "x", '{"priority": 1}'),
        ("sampling_params", None, '{"max_new_tokens": 1024}'),
    ],
)
async def test_an_argument_of_a_call_that_is_of_another_kind_is_named(argument: str, value: Any, wanted: str) -> None:
    arguments: dict[str, Any] = {"sampling_params": {"max_new_tokens": 8}, argument: value}
    async with Replay(WHOLE) as server, Client(server.url) as client:
        with pytest.raises(TypeError) as refused:
            client.start([1], **arguments)
        assert (server.accepted, client.running) == (0, [])
    assert str(refused.value).startswith(f"{argument} must be a ")
    assert str(refused.value).endswith(f", such as {wanted}; not {value!r}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Client("http://x", timeouts=5), "timeouts must be a Timeouts, such as "),  # type: ignore[arg-type]
        (lambda: Client("http://x", retries=3), "retries must be a Retries, such as "),  # type: ignore[arg-type]
        (lambda: Client("http://x", limits=5), "limits must be a Limits, such as "),  # type: ignore[arg-type]
        (lambda: Client("http://x", extra="x"), "extra must be a mapping, such as "),  # type: ignore[arg-type]
        (lambda: Client("http://x", headers=[1]), "headers must be a mapping, such as "),  # type: ignore[arg-type]
        (lambda: Client("http://x", headers="secret"), "headers must be a mapping, such as "),  # type: ignore[arg-type]
        (lambda: Client("http://x", headers={"a": b"secret"}), "the header 'a' must be text"),  # type: ignore[dict-item]
        (lambda: Client(None), "base_url must be a str, such as "),  # type: ignore[arg-type]
        (lambda: RolloutConfig(groups=1, extra="x"), "extra must be a mapping, such as "),  # type: ignore[arg-type]
        (lambda: RolloutConfig(groups=1, headers="x"), "headers must be a mapping, such as "),  # type: ignore[arg-type]
        (lambda: CompletionOptions(routing_header=5), "routing_header must be"),  # type: ignore[arg-type]
        (lambda: Timeouts(connect="5"), "connect must be a number of seconds"),  # type: ignore[arg-type]
        (lambda: Retries(first="x"), "first must be a number of seconds"),  # type: ignore[arg-type]
        (lambda: Retries(jitter="x"), "jitter must be a number"),  # type: ignore[arg-type]
    ],
)
def test_a_setting_that_is_of_another_kind_is_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        make()
    assert str(refused.value).startswith(words)
    assert "secret" not in str(refused.value)


async def test_a_sample_whose_prompt_is_a_chat_or_whose_session_is_no_text_is_refused() -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        with pytest.raises(ValueError, match=r"sample\.prompt is the messages of a chat.*apply_chat_template"):
            await complete(client, Sample(prompt=CHAT), {"max_new_tokens": 8})
        with pytest.raises(TypeError, match=r"sample\.session_id must be text.*not 5"):
            await complete(client, Sample(tokens=[1], session_id=5), {"max_new_tokens": 8})  # type: ignore[arg-type]
        assert server.accepted == 0


def test_a_client_that_is_pickled_or_copied_says_to_make_one_where_it_is_needed() -> None:
    client = Client("http://10.0.0.1:30000", engine="vllm")
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"Client, 'http://10\.0\.0\.1:30000', engine='vllm'.*in each process"):
            copied(client)


def test_tensors_without_torch_name_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import streamfold, numpy\n"
        "generation = streamfold.Generation(numpy.array([1], 'int32'), None)\n"
        "try: generation.torch()\n"
        "except ImportError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "Generation.torch() needs torch: pip install 'streamfold[torch]'\n"


def test_what_is_no_trace_or_observer_is_refused_before_any_call() -> None:
    """The first call hung."""
    for given, words in (({"trace": "x.json"}, "trace must be"), ({"observers": [str]}, "each of observers must be")):
        with pytest.raises(TypeError, match=words):
            Client("http://127.0.0.1:9", **given)
    with pytest.raises(TypeError, match="trace must be"):
        RolloutConfig(groups=1, trace="x.json")  # type: ignore[arg-type]


async def test_what_is_observed_by_something_that_is_no_observer_ends_all_the_same(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server, speech.client(server.url) as client:
        with observed("nobody"):  # type: ignore[arg-type]
            assert (await asyncio.wait_for(client.generate(PROMPT, ASKED), 20)).token_ids.tolist() == [1, 2, 3]
