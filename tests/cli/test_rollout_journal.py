"""Prompts in, samples out: what is in the file after a writer died, and what is refused."""

from __future__ import annotations

import fcntl
import json
import resource
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson
import pytest

from streamfold.cli import journal
from streamfold.cli.journal import Journal, Plan, read_samples
from streamfold.cli.prompts import read_prompt
from streamfold.samples.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = {"max_new_tokens": 8}
ARRAYS: tuple[Literal["lists", "npz"], ...] = ("lists", "npz")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts: a text that holds what Python takes for ends of lines, ids, and the same text again."""
    path = tmp_path / "prompts.jsonl"
    lines = ('{"prompt": "a\u2028b\x85c", "input_ids": [1, 2]}', "", '{"input_ids": [3]}', '{"text": "a\u2028b\x85c"}')
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "samples.jsonl"


def ended(plan: Plan, index: int, *, more: int = 2, partial: bool = False) -> Sample:
    """A sample of the plan with everything that can be one per token."""
    sample = plan[index]
    tokens = len(sample.tokens) + more
    sample.append_response_tokens(
        tokens=list(range(10, 10 + more)),
        log_probs=[-0.1] * more,
        text="\u2028" * more,
        meta_info={
            "finish_reason": {"type": "abort" if partial else "stop"},
            "top_p_token_ids": np.arange(more, dtype=np.int32),
            "top_p_token_offsets": np.arange(more + 1, dtype=np.int32),
            "routed_experts": np.arange((tokens - 1) * 6, dtype=np.int32).reshape(-1, 3, 2),
        },
        update_terminal_info=True,
    )
    return sample


def told(sample: Sample) -> dict[str, Any]:
    """All of a sample but the place of its arrays."""
    metadata = {key: value for key, value in sample.metadata.items() if key != "arrays"}
    return {**sample.to_dict(), "metadata": metadata}


def files(path: Path) -> set[str]:
    return {name.relative_to(path.parent).as_posix() for name in path.parent.rglob("*") if name.is_file()}


# The plan.


def test_a_plan_has_n_samples_of_each_line_and_twins_are_prompts_of_their_own(prompts: Path) -> None:
    plan = Plan(prompts, PARAMS, n=2, seed=40)
    made = [plan[index] for index in range(len(plan))]
    assert [sample.index for sample in made] == list(range(6))
    assert [sample.group_index for sample in made] == [0, 0, 1, 1, 2, 2]
    assert [sample.prompt for sample in made[::2]] == ["a\u2028b\x85c", "", "a\u2028b\x85c"]
    assert [sample.tokens for sample in made[::2]] == [[1, 2], [3], []]
    assert [sample.metadata["sampling_params"]["sampling_seed"] for sample in made] == list(range(40, 46))
    assert plan.texts == 1


def test_samples_of_a_plan_share_nothing_that_changes(prompts: Path) -> None:
    plan = Plan(prompts, {**PARAMS, "stop": ["x"]})
    first, again = plan[0], plan[0]
    first.tokens.append(9)
    first.metadata["note"] = 1
    assert again.tokens == plan[0].tokens == [1, 2]
    assert "note" not in again.metadata


def test_other_keys_of_a_prompt_go_with_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi", "label": "42", "source": "gsm", "metadata": {"level": 3}}\n', encoding="utf-8")
    sample = Plan(path, PARAMS)[0]
    assert sample.label == "42"
    assert sample.metadata == {"source": "gsm", "level": 3, "sampling_params": PARAMS}


def test_prompts_without_ids_are_encoded_where_something_can(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"input_ids": [7]}\n{"prompt": [{"role": "user", "content": "Ho"}]}\n', "utf-8")
    plan = Plan(path, PARAMS, encode=lambda prompt: [len(prompt)])
    assert [plan[index].tokens for index in range(3)] == [[2], [7], [1]]
    with pytest.raises(ValueError, match="line 3: the messages of a chat need a tokenizer"):
        Plan(path, PARAMS)


def test_a_prompt_that_the_tokenizer_cannot_encode_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"prompt": [{"content": "Ho"}]}\n', "utf-8")
    with pytest.raises(ValueError, match=r"line 2: the tokenizer cannot encode it: KeyError: 'role'"):
        Plan(path, PARAMS, encode=lambda prompt: [1] if isinstance(prompt, str) else [len(prompt[0]["role"])])


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "is not JSON"),
        ('{"prompt": "\\ud800"}', "is not JSON"),
        ("[1]", "an object like"),
        ('{"question": "Hi"}', "neither a prompt"),
        ('{"prompt": ""}', "neither a prompt"),
        ('{"prompt": 7}', "neither a prompt"),
        ('{"input_ids": []}', "input_ids must be"),
        ('{"input_ids": [1, true]}', r"input_ids must be integers from 0 to 2147483647; input_ids\[1\] is true$"),
        ('{"input_ids": "12"}', 'input_ids must be.*; it is "12"$'),
        ('{"input_ids": {"a": 1}}', r'input_ids must be.*; it is \{"a":1\}$'),
        ('{"input_ids": [-1]}', r"input_ids must be.*input_ids\[0\] is -1$"),
        ('{"input_ids": [2147483647, 2147483648]}', r"input_ids\[1\] is 2147483648$"),
        ('{"input_ids": [1.0]}', r"input_ids\[0\] is 1.0$"),
        ('{"input_ids": [1, 2, null]}', r"input_ids\[2\] is null$"),
        ('{"input_ids": [1, [2]]}', r"input_ids\[1\] is \[2\]$"),
        ('{"input_ids": ["a"]}', r'input_ids\[0\] is "a"$'),
        ('{"input_ids": ["' + 99 * "a" + '"]}', r'input_ids\[0\] is "a{59}\.\.\.$'),
        ('{"prompt": 7, "input_ids": [1]}', "prompt is 7, but it must be a text, or the messages of a chat"),
        ('{"prompt": ["Hi"]}', r'prompt is \["Hi"\], but it must be a text, or the messages of a chat'),
        ('{"prompt": "Hi", "arrays": 1}', "arrays is set by the rollout itself"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "Hi"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=f"line 2.*{word}"):
        Plan(path, PARAMS)


def test_a_plan_of_nothing_is_refused(tmp_path: Path, prompts: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="holds no prompt"):
        Plan(tmp_path / "empty.jsonl", PARAMS)
    with pytest.raises(ValueError, match="at least one sample"):
        Plan(prompts, PARAMS, n=0)


# The journal.


@pytest.mark.parametrize("arrays", ARRAYS)
def test_what_was_written_is_read_again_bit_for_bit(arrays: Literal["lists", "npz"], prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS, n=2)
    written = [ended(plan, 4), ended(plan, 0), ended(plan, 3, partial=True)]
    with Journal(out, plan, arrays) as journal:
        for sample in written:
            journal.write(sample)
    assert [told(sample) for sample in read_samples(out)] == [told(sample) for sample in written]
    with Journal(out, plan, arrays) as journal:
        assert journal.finished == {0, 4}
        assert {index: told(sample) for index, sample in journal.partial.items()} == {3: told(written[2])}


def test_a_line_is_a_sample_as_json_and_npz_takes_the_arrays_out_of_it(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    sample = ended(plan, 0)
    with Journal(out, plan) as journal:
        journal.write(sample)
    assert [json.loads(line) for line in out.read_bytes().splitlines()] == [json.loads(json.dumps(sample.to_dict()))]
    beside = out.with_name("other.jsonl")
    with Journal(beside, plan, "npz") as journal:
        journal.write(sample)
    line = json.loads(beside.read_bytes())
    with np.load(out.parent / line["metadata"]["arrays"]) as found:
        assert {name: found[name].tolist() for name in found} == {
            name: value for name, value in sample.to_dict().items() if name not in line
        }
        assert found["rollout_routed_experts"].shape == (3, 3, 2)
        assert found["rollout_log_probs"].dtype == np.float64


@pytest.mark.parametrize("arrays", ARRAYS)
def test_a_later_line_takes_the_place_of_a_partial_one(
    arrays: Literal["lists", "npz"], prompts: Path, out: Path
) -> None:
    plan = Plan(prompts, PARAMS)
    last = [ended(plan, 1), ended(plan, 0, more=3)]
    journal = Journal(out, plan, arrays)
    for sample in (ended(plan, 0, more=1, partial=True), ended(plan, 0, partial=True), *last):
        journal.write(sample)
    assert (journal.finished, journal.partial) == ({0, 1}, {})
    assert len(out.read_bytes().splitlines()) == 4  # a writer that is killed here leaves them so
    assert len(files(out)) == 2 + 2 * (arrays == "npz")
    assert [told(sample) for sample in read_samples(out)] == [told(sample) for sample in last]
    journal.__exit__()
    assert len(out.read_bytes().splitlines()) == 2
    assert [told(sample) for sample in read_samples(out)] == [told(sample) for sample in last]
    assert len(files(out)) == 2 + 2 * (arrays == "npz")


def test_a_journal_can_be_written_to_after_it_was_tidied(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan) as journal:
        journal.write(ended(plan, 0, more=1, partial=True))
        journal.write(ended(plan, 0, partial=True))
    with Journal(out, plan) as journal:
        for index in (2, 0, 1):
            journal.write(ended(plan, index))
    assert [sample.index for sample in read_samples(out)] == [2, 0, 1]


def test_the_place_of_arrays_may_change_from_run_to_run(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan, "npz") as journal:
        journal.write(ended(plan, 0, partial=True))
        journal.write(ended(plan, 1))
    with Journal(out, plan, "lists") as journal:
        (partial,) = journal.partial.values()
        partial.append_response_tokens(
            tokens=[7],
            log_probs=[-0.2],
            meta_info={"finish_reason": "stop", "top_p_token_ids": [7], "top_p_token_offsets": [0, 1]},
            update_terminal_info=True,
        )
        journal.write(partial)
        journal.write(ended(plan, 2))
    first, second, _ = (json.loads(line) for line in out.read_bytes().splitlines())
    assert ("tokens" in first, "tokens" in second) == (False, True)
    assert "arrays" not in second["metadata"]
    assert files(out) == {"prompts.jsonl", "samples.jsonl", first["metadata"]["arrays"]}
    assert [sample.tokens for sample in read_samples(out)] == [[3, 10, 11], [1, 2, 10, 11, 7], [10, 11]]


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan) as journal:
        journal.write(ended(plan, 0))
        first = out.read_bytes()
        journal.write(ended(plan, 1))
    whole = out.read_bytes()
    for size in range(len(first) + 1, len(whole)):
        out.write_bytes(whole[:size])
        assert [sample.index for sample in read_samples(out)] == [0]
        with Journal(out, plan) as journal:
            assert journal.finished == {0}
        assert out.read_bytes() == first


def test_arrays_that_no_line_names_are_removed_and_nothing_else(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan, "npz") as journal:
        journal.write(ended(plan, 0))
    folder = out.with_name("samples.jsonl.arrays")
    (folder / "000001-0123abcd.npz").write_bytes(b"torn")
    (folder / "mine.npz").write_bytes(b"mine")
    before = files(out)
    Journal(out, plan, "npz").__exit__()
    assert before - files(out) == {"samples.jsonl.arrays/000001-0123abcd.npz"}


def test_a_full_disk_leaves_the_file_as_it_was(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(out, plan) as journal:
        journal.write(ended(plan, 0))
        before = out.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))
        try:
            with pytest.raises(OSError, match=r"File too large: raise the limit .*ulimit -f.*samples\.jsonl"):
                journal.write(ended(plan, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert out.read_bytes() == before
        journal.write(ended(plan, 2))
    assert [sample.index for sample in read_samples(out)] == [0, 2]


def test_two_writers_at_once_are_refused_also_where_the_first_has_tidied(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    dead = Journal(out, plan)
    dead.write(ended(plan, 0, partial=True))
    dead.write(ended(plan, 0))
    with pytest.raises(OSError, match="being written by another run"):
        Journal(out, plan)
    left = out.read_bytes()
    dead.__exit__()
    out.write_bytes(left)
    with Journal(out, plan):
        assert len(out.read_bytes()) < len(left)
        with pytest.raises(OSError, match="being written by another run"):
            Journal(out, plan)


@pytest.mark.parametrize("arrays", ARRAYS)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n": 3}, "group_index"),
        ({"n": 1}, "group_index"),
        ({"seed": 1}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": 9}}, "sampling_params"),
        ({"line": (0, '{"prompt": "other", "input_ids": [1, 2]}')}, "prompt differ"),
        ({"line": (2, '{"input_ids": [4]}')}, "the prompt's ids"),
        ({"line": (3, '{"text": "other"}')}, "prompt differ"),
    ],
)
def test_a_journal_of_another_plan_is_refused_untouched(
    arrays: Literal["lists", "npz"], change: dict[str, Any], word: str, prompts: Path, out: Path
) -> None:
    plan = Plan(prompts, PARAMS, n=2, seed=0)
    with Journal(out, plan, arrays) as journal:
        for index in range(1, 6):
            journal.write(ended(plan, index))
    before = out.read_bytes()
    if "line" in change:
        number, line = change["line"]
        lines = prompts.read_text(encoding="utf-8").split("\n")
        prompts.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]), encoding="utf-8")
    asked = {"sampling_params": PARAMS, "n": 2, "seed": 0, **change}
    other = Plan(prompts, **{name: value for name, value in asked.items() if name != "line"})
    with pytest.raises(ValueError, match=rf"line \d: .*{word}.*another file"):
        Journal(out, other, arrays)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "damage", [b"{}\n", b"[]\n", b"7\n", b"null\n", b"\n", b'{"index": "0"}\n', b"\0\0\0\n", b"\0"]
)
def test_damage_in_the_middle_is_named_and_left_alone(damage: bytes, prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan) as journal:
        journal.write(ended(plan, 0))
        good = out.read_bytes()
    out.write_bytes(good + damage)
    with pytest.raises(ValueError, match="line 2 is not a sample of a rollout"):
        Journal(out, plan)
    assert out.read_bytes() == good + damage


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_file_of_something_else_is_never_touched(end: str, prompts: Path) -> None:
    plan = Plan(prompts, PARAMS)
    prompts.write_text('{"prompt": "one line, whose end may be missing"}' + end, encoding="utf-8")
    before = prompts.read_bytes()
    with pytest.raises(ValueError, match="line 1 is not a sample of a rollout"):
        Journal(prompts, plan)
    assert prompts.read_bytes() == before


def test_arrays_that_have_vanished_are_an_error(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan, "npz") as journal:
        journal.write(ended(plan, 0, partial=True))
    for file in out.with_name("samples.jsonl.arrays").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="line 1 is not a sample"):
        Journal(out, plan, "npz")


def test_a_sample_of_no_plan_is_refused(prompts: Path, out: Path) -> None:
    with Journal(out, Plan(prompts, PARAMS)) as journal, pytest.raises(ValueError, match="no index"):
        journal.write(Sample(tokens=[1]))


def test_a_run_that_starts_while_another_one_ends_writes_to_the_file_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    lock = fcntl.flock

    def replaced_first(file: Any, how: int) -> None:
        if path.read_bytes() == b"old":
            (tmp_path / "new").write_bytes(b"new")
            (tmp_path / "new").replace(path)
        lock(file, how)

    monkeypatch.setattr("streamfold.cli.journal.fcntl.flock", replaced_first)
    with journal._open(path) as file:
        file.write(b"er")
    assert path.read_bytes() == b"newer"


@pytest.mark.parametrize(
    "line",
    [
        '"metadata": "x"',
        '"streamfold_restarted_tokens": "x"',
        '"streamfold_resumed": 1',
        '"metadata": {"streamfold_lost_side_data": "x"}',
        '"sampling_params": {}',
    ],
)
def test_notes_that_the_rollout_makes_itself_are_refused_by_line(line: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [1], ' + line + "}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1"):
        read_prompt(prompts.read_bytes(), "line 1", None)


def test_a_dataset_may_have_any_names_that_are_not_ours(tmp_path: Path, out: Path) -> None:
    """They stay as they are through a partial sample that is read back."""
    own = {"resumed": 1, "failures": 3, "text_joined": True, "model_name": "a teacher"}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(orjson.dumps({"input_ids": [1, 2], "metadata": own}) + b"\n")
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan) as written:
        written.write(ended(plan, 0, partial=True))
    with Journal(out, plan) as read:
        assert {key: read.partial[0].metadata[key] for key in own} == own
        assert not [key for key in read.partial[0].metadata if key.startswith("streamfold_")]


def test_a_partial_sample_of_an_earlier_version_keeps_its_counts_under_todays_names(prompts: Path, out: Path) -> None:
    plan = Plan(prompts, PARAMS)
    with Journal(out, plan) as written:
        sample = ended(plan, 0, partial=True)
        sample.metadata |= {"resumed": 2, "restarted_tokens": 7, "text_joined": True}
        written.write(sample)
    with Journal(out, plan) as read:
        metadata = read.partial[0].metadata
    counts = {"streamfold_resumed": 2, "streamfold_restarted_tokens": 7, "streamfold_text_joined": True}
    assert metadata == {"sampling_params": plan[0].metadata["sampling_params"], **counts}
