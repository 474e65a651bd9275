"""Scripts of faults: their checks, which requests they choose, and that every run is the same."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from typer.testing import CliRunner

from streamfold.cli.main import app
from streamfold.loopback import Config, Faults, Loopback, create_app
from streamfold.loopback import faults as documentation
from streamfold.loopback.faults import options
from streamfold.loopback.faults import script as faults
from streamfold.loopback.faults.injector import Injector
from support.loopback_http import PLAIN, generate, get, load, payload, post, undisturbed, until
from support.paths import EXAMPLES
from support.raw_http import ask

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLE = EXAMPLES / "faults.json"


def chosen(*rules: dict[str, Any], seed: int = 0, requests: int = 20, **body: Any) -> list[list[int]]:
    """For each rule the numbers of the requests that it applies to, among ``requests`` streams."""
    injector = Injector(Faults(rules, seed=seed))
    found: list[list[int]] = [[] for _ in rules]
    for number in range(requests):
        asked = json.dumps({"stream": True, "rid": f"job-{number}", **body}).encode()
        for rule, _ in injector.choose("/generate", asked, since_abort_all=5.0):
            found[rule.place].append(number)
    return found


def drop(**conditions: Any) -> dict[str, Any]:
    return {"kind": "drop", **conditions}


# Which requests


def test_a_rule_is_for_the_requests_that_all_its_conditions_name() -> None:
    assert chosen(
        drop(requests=3),
        drop(requests=[0, 5, 50]),
        drop(every=6),
        drop(every=2, requests=[4, 5, 6, 7]),
        drop(rid="job-1"),
        drop(rid="job-1", times=2),
        drop(times=3),
        drop(path="/abort_request"),
        drop(after_abort_all=10, times=1),
        drop(after_abort_all=1),
    ) == [[3], [0, 5], [5, 11, 17], [5, 7], [1, *range(10, 20)], [1, 10], [0, 1, 2], [], [0], []]


def test_a_rule_for_streams_leaves_other_requests_alone_and_does_not_count_them() -> None:
    injector = Injector(Faults([{"kind": "glue", "times": 1}, drop(every=1)]))
    asked = [injector.choose("/generate", b'{"stream": %b}' % stream, 0.0) for stream in (b"false", b"true", b"true")]
    assert [[rule.kind.kind for rule, _ in found] for found in asked] == [["drop"], ["glue", "drop"], ["drop"]]


def test_a_rate_hits_about_that_share_and_the_very_same_requests_in_every_run() -> None:
    rates = (0.0, 0.01, 0.3, 0.3, 1.0)
    rules = [drop(rate=rate) for rate in rates]
    first = chosen(*rules, seed=5, requests=4000)
    for rate, numbers in zip(rates, first, strict=True):
        assert abs(len(numbers) - 4000 * rate) <= 5 * (4000 * rate * (1 - rate)) ** 0.5
    assert first[2] != first[3], "each rule draws for itself"
    assert chosen(*rules, seed=5, requests=4000) == first
    assert chosen(*rules, seed=6, requests=4000) != first


def test_whether_a_rate_hits_a_request_depends_on_its_number_alone() -> None:
    alone = chosen(drop(rate=0.2), seed=1, requests=300)[0]
    among_others, _ = chosen(drop(rate=0.2), {"kind": "cut", "rate": 0.5}, seed=1, requests=300, extra="x")
    assert among_others == alone
    some = chosen(drop(rate=0.2, requests=list(range(100, 200))), seed=1, requests=300)[0]
    assert some == [number for number in alone if 100 <= number < 200]


def test_a_pair_draws_a_number_for_each_request_and_the_same_one_in_every_run() -> None:
    script = Faults([{"kind": "cut", "after_bytes": [3, 6]}, {"kind": "silence", "seconds": [1, 2]}], seed=2)

    def drawn() -> list[tuple[int, float]]:
        unused: Any = None  # no response is disturbed
        made = [
            [rule.make(unused, unused, unused, script.chance(rule, n), print) for rule in script.rules]
            for n in range(200)
        ]
        return [(cut.after_bytes, silence.seconds) for cut, silence in made]  # type: ignore[attr-defined]

    numbers = drawn()
    assert {count for count, _ in numbers} == {3, 4, 5, 6}
    assert all(1 <= seconds <= 2 for _, seconds in numbers)
    assert len({seconds for _, seconds in numbers}) == 200
    assert drawn() == numbers


# What they say


@pytest.mark.parametrize(
    ("rule", "problems"),
    [
        ({"kind": "rset"}, ["rule 1: unknown kind 'rset'", "there are abort, comments, cut, die, "]),
        ({}, ["unknown kind None"]),
        ({"kind": ["cut"]}, ["unknown kind ['cut']"]),
        ("cut", ["rule 1: an object was expected, got 'cut'"]),
        (
            {"kind": "cut", "afterbytes": 3},
            ["rule 1 (cut): unknown key 'afterbytes'", "how, after_bytes, after_events of its own", "rate, rid"],
        ),
        ({"kind": "glue", "seconds": 3}, ["unknown key 'seconds'; it takes size of its own, and path, requests"]),
        ({"kind": "queue_full", "size": 3}, ["it takes no key of its own, and path"]),
        ({"kind": "cut", "how": "reset"}, ["how must be one of rst, fin, got 'reset'"]),
        (
            {"kind": "cut", "after_bytes": -1},
            ["after_bytes must be a whole number from 0 on, or [least, most], or null"],
        ),
        ({"kind": "cut", "after_bytes": [9, 3]}, ["got [9, 3]"]),
        ({"kind": "cut", "after_bytes": [1, 2, 3]}, ["got [1, 2, 3]"]),
        ({"kind": "cut", "after_bytes": True}, ["got True"]),
        ({"kind": "cut", "rate": 2}, ["rate must be a number from 0 to 1, or null, got 2"]),
        ({"kind": "cut", "every": [1, 2]}, ["every must be a whole number from 1 on, or null"]),
        ({"kind": "cut", "requests": [1, -2]}, ["requests must be a whole number from 0 on, or a list of them"]),
        ({"kind": "cut", "rid": 5}, ["rid must be a string"]),
        ({"kind": "silence", "seconds": "1"}, ["seconds must be a number from 0 on, or [least, most], or null"]),
        ({"kind": "comments", "pause": None}, ["pause must be a number from 0 on, or [least, most], got None"]),
        ({"kind": "status", "status": 999}, ["status must be a whole number from 200 to 599"]),
        ({"kind": "status", "headers": {"retry-after": 1}}, ['headers must be an object of strings, as in {"Retry-A']),
        ({"kind": "status", "headers": {"X": "a\r\nY: b"}}, ["that HTTP can carry"]),
        ({"kind": "status", "headers": {"X": "\u2028"}}, ["that HTTP can carry"]),
        ({"kind": "status", "headers": {"X ": "a"}}, ["that HTTP can carry"]),
        ({"kind": "status", "headers": {"Content-Length": "3"}}, ["none of content-length and transfer-encoding"]),
        ({"kind": "status", "body": {"x": float("nan")}}, ["body must be any JSON", "got {'x': nan}"]),
        ({"kind": "status", "body": "\ud800"}, ["body must be any JSON"]),
        ({"kind": "status", "path": "generate"}, ["path must be a string like \"/generate\", or null, got 'generate'"]),
        ({"kind": "error_event", "payload": 10**30}, ["payload must be any JSON, its numbers of 64 bits"]),
        ({"kind": "version", "version": "\udfff"}, ["version must be a string or null"]),
        ({"kind": "error_event", "done": 1}, ["done must be true or false"]),
        ({"kind": "cut", "path": "/v1/loads"}, ["rule 1 (cut): it is for /generate, not for /v1/loads"]),
    ],
)
def test_a_rule_that_makes_no_sense_is_an_error_that_says_what_would(rule: Any, problems: list[str]) -> None:
    with pytest.raises(ValueError, match="rule 1") as raised:
        Faults([{"kind": "drop"}, rule])
    for part in problems:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", 'an object with "rules", a list, was expected'),
        ('{"rules": {}}', 'an object with "rules", a list, was expected'),
        ('{"rules": [], "sede": 1}', "unknown key 'sede'; a script has rules and seed"),
        ('{"rules": [], "seed": "x"}', "seed must be a whole number, got 'x'"),
        ('{"rules": [{"kind": "nap"}]}', "rule 0: unknown kind 'nap'"),
    ],
)
def test_a_file_that_is_no_script_is_named_with_what_is_wrong(script: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(script, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(problem)) as raised:
        Faults.read(path)
    assert str(raised.value).startswith(f"{path}: ")
    with pytest.raises(FileNotFoundError):
        Faults.read(tmp_path / "none.json")


@pytest.mark.parametrize("kind", ["shrink", "rewrite"])
def test_what_needs_a_cumulative_stream_is_refused_where_none_is(kind: str) -> None:
    script = Faults([{"kind": kind}])
    with pytest.raises(ValueError, match=rf"rule 0 \({kind}\): an incremental stream repeats nothing"):
        Config(incremental=True, faults=script)
    with Loopback(incremental=True) as engine:
        with pytest.raises(ValueError, match="repeats nothing"):
            engine.faults = script
        assert ask(engine).end == "whole"
    assert Config(faults=script).faults is script


def test_the_documentation_names_every_kind_with_its_keys_and_every_condition() -> None:
    documented = dict(
        re.findall(r"^- ``(\w+)``: (.*?)(?=^- |\n\n|\Z)", documentation.__doc__ or "", re.DOTALL | re.MULTILINE)
    )
    conditions = options.options(faults.Conditions)
    assert set(documented) == set(faults.KINDS) | set(conditions)
    for name, kind in faults.KINDS.items():
        keys = set(options.options(kind))
        assert set(re.findall(r"``(\w+)``", documented[name])) == keys, name


# At work


def test_faults_change_while_the_engine_runs_and_begin_to_count_anew() -> None:
    with Loopback(faults=Faults([drop(requests=1)])) as engine:
        assert [ask(engine).end for _ in range(3)] == ["whole", "rst", "whole"]
        assert engine.faults.done == {"drop": 1}
        engine.faults = Faults([drop(requests=0, how="fin")])
        assert engine.faults.done == {}
        assert [ask(engine).end for _ in range(2)] == ["fin", "whole"]
        assert engine.faults.done["drop"] == 1
        assert engine.faults.done["cut"] == 0
        engine.faults = None
        assert ask(engine).end == "whole"
        assert load(engine) == (0, 0)


def test_two_engines_with_one_script_count_for_themselves() -> None:
    config = Config(faults=Faults([drop(times=1)]))
    with Loopback(config) as one, Loopback(config) as two:
        assert [ask(one).end, ask(one).end, ask(two).end, ask(two).end] == ["rst", "whole", "rst", "whole"]
        assert (one.faults.done["drop"], two.faults.done["drop"]) == (1, 1)


def test_faults_that_meet_act_in_their_order() -> None:
    with Loopback(incremental=True, token_rate=200) as engine:
        engine.faults = Faults([{"kind": "glue"}, {"kind": "cut", "after_events": 2}])
        heard = ask(engine)
        assert (heard.end, heard.counts, len(heard.chunks)) == ("rst", [1, 2, 3, 4], 2)
        engine.faults = Faults([{"kind": "double_event"}, {"kind": "drop_event", "after_events": 1}])
        assert ask(engine, params={"max_new_tokens": 3}).counts == [1, 2, 3]
        assert engine.faults.done == {"double_event": 1, "drop_event": 1}
        engine.faults = Faults([{"kind": "split", "size": 100}, {"kind": "cut", "after_bytes": 250}])
        heard = ask(engine)
        assert (heard.end, [len(chunk) for chunk in heard.chunks]) == ("rst", [100, 100, 50])


def test_other_paths_can_be_disturbed_too() -> None:
    with Loopback(base_path="/api", faults=Faults([{"kind": "status", "path": "/v1/loads", "status": 502}])) as engine:
        assert get(engine, "v1/loads").status_code == 502
        assert generate(engine).status == 200
        engine.faults = Faults([{"kind": "no_answer", "path": "/abort_request"}])
        assert ask(engine, path="/api/abort_request", abort_all=True, seconds=0.2).end == "silence"
        assert get(engine, "v1/loads").status_code == 200


def test_a_fault_below_http_says_where_it_would_work() -> None:
    async def run(kind: str) -> None:
        application = create_app(Config(faults=Faults([{"kind": kind}])))
        transport = httpx.ASGITransport(application)
        async with application.router.lifespan_context(application), httpx.AsyncClient(transport=transport) as client:
            await client.post("http://x/generate", json=payload())

    for kind in ("drop", "die"):
        with pytest.raises(RuntimeError, match=r"run the engine with Loopback or serve\(\)"):
            asyncio.run(run(kind))


def test_whatever_befalls_the_requests_each_resumes_to_the_undisturbed_generation_and_nothing_is_left() -> None:
    """The example script, and a client of a few lines: try again, or go on from the tokens that have come."""
    rules = json.loads(EXAMPLE.read_text(encoding="utf-8"))["rules"]
    harmful = ("double_event", "drop_event")  # a client has to see that they are, and this one does not look
    rules = [rule for rule in rules if rule["kind"] not in harmful]
    params = {"max_new_tokens": 60, "temperature": 1}

    def complete(engine: Loopback, seed: int) -> list[int]:
        kept: list[int] = []
        for _ in range(200):
            left = {**params, "sampling_seed": seed, "max_new_tokens": 60 - len(kept)}
            try:
                heard = ask(engine, input_ids=[300, *kept], params=left)
            except ConnectionRefusedError:
                until(lambda: not refused(engine))
                continue
            if heard.raw and heard.status == 200:
                frames = [frame for frame in heard.frames if "meta_info" in frame]
                kept += [token for frame in frames for token in frame["output_ids"]]
                if frames and (frames[-1]["meta_info"]["finish_reason"] or {}).get("type") == "length":
                    return kept
        raise AssertionError("it never came to an end")

    with Loopback(incremental=True, faults=Faults(rules, seed=3)) as engine:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda seed: complete(engine, seed), range(60)))
        for seed, ids in enumerate(found):
            assert ids == undisturbed(engine, input_ids=[300], params={**params, "sampling_seed": seed}).token_ids
        assert set(engine.faults.done) == {rule["kind"] for rule in rules}
        assert engine.stats().requests > 80
        until(lambda: load(engine) == (0, 0))
        until(lambda: engine.stats().open_connections == 0)


def refused(engine: Loopback) -> bool:
    try:
        post(engine, "continue_generation")
    except httpx.TransportError:
        return True
    return False


# From the command line


@contextmanager
def serving(*arguments: str | Path) -> Iterator[str]:
    """``streamfold serve`` on a free port; its URL. Ended as Ctrl-C ends it, with 0."""
    command = [sys.executable, "-m", "streamfold", "serve", "--port", "0", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0


def test_serve_runs_the_example_script() -> None:
    body = payload(params={"max_new_tokens": 3})
    with serving("--token-rate", "0", "--faults", EXAMPLE) as url:
        first = httpx.post(f"{url}/generate", json=body, **PLAIN)
        assert (first.status_code, first.headers["retry-after"]) == (429, "0.1")
        for _ in itertools.repeat(None, 10):
            try:
                answer = httpx.post(f"{url}/generate", json=body, **PLAIN)
            except httpx.TransportError:
                continue
            if answer.status_code == 200 and answer.content.endswith(b"data: [DONE]\n\n"):
                break
        else:
            raise AssertionError("no request came through")


def test_serve_says_what_is_wrong_with_a_script(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"rules": [{"kind": "shrink"}]}', encoding="utf-8")
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--incremental", "--faults", str(path)])
    assert done.exit_code == 2
    assert "rule 0 (shrink): an incremental stream repeats nothing" in " ".join(done.output.split())
    path.write_text('{"rules": [{"kind": "nap"}]}', encoding="utf-8")
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--faults", str(path)])
    assert done.exit_code == 2
    assert "unknown kind 'nap'; there are abort," in " ".join(done.output.split())
