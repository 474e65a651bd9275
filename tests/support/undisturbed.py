"""What a sample comes to that nobody disturbs, to be compared with what it has, and ways to disturb it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from streamfold import Client, StreamfoldError
from streamfold.samples.completion import complete
from streamfold.samples.options import CompletionOptions
from streamfold.samples.sample import Sample
from support.disturbing import TOP_P

if TYPE_CHECKING:
    from streamfold import Generation
    from support.disturbing import Site, Watched

ENDS = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED}


class Work:
    """A sample, the parameters of its response, and what one undisturbed call gives for it."""

    def __init__(self, site: Site, sample: Sample, params: dict[str, Any]) -> None:
        self.sample = sample
        self.params = params
        self.prompt = list(sample.tokens)
        self.wanted = site.one.undisturbed(self.prompt, params, return_logprob=True, return_routed_experts=True)
        self.cuts: Counter[str] = Counter()  # of ours, by their kind
        self._generations: list[Generation] = []
        self._tokenizer = site.one.tokenizer

    def note(self, generation: Generation) -> None:
        """Take note of what a call has brought."""
        self._generations.append(generation)

    def differs_so_far(self) -> dict[str, Any]:
        """What is not the beginning of what it should be."""
        sample, n = self.sample, self.sample.response_length
        wanted = {
            "tokens": [*self.prompt, *self.wanted.token_ids[:n]],
            "rollout_log_probs": (self.wanted.logprobs or [])[:n],
            "loss_mask": [1] * n,
        }
        return _unlike({name: getattr(sample, name) or [] for name in wanted}, wanted)

    def differs(self, client: Client) -> dict[str, Any]:
        """What is not as it should be at the end."""
        sample, told = self.sample, self.wanted
        has: dict[str, Any] = {"status": sample.status, "length": sample.response_length}
        wanted: dict[str, Any] = {"status": ENDS[(told.finish or {})["type"]], "length": len(told.token_ids)}
        # Without a tokenizer nobody can tell what the text of a part lacks, or which characters came twice.
        if client.tokenizer is not None or (self._came_in_one and not _has_all_some_twice(sample.response, self._text)):
            has["response"], wanted["response"] = sample.response, self._text
        if told.token_ids:
            borders = [0, *(end for _, _, end in sample.version_spans)]
            has["versions"] = [(start, end) for _, start, end in sample.version_spans], borders[-1]
            wanted["versions"] = list(itertools.pairwise(borders)), len(told.token_ids)
        if client.experts is not None:
            has["experts"] = np.asarray(sample.rollout_routed_experts, "<i4").tobytes()
            has["dtype"], wanted["dtype"] = np.asarray(sample.rollout_routed_experts).dtype, client.experts.dtype
            wanted["experts"] = told.routed_experts
        if told.top_p is not None:
            has["top-p ids"] = np.asarray(sample.rollout_top_p_token_ids).tolist()
            wanted["top-p ids"] = [token for kept in told.top_p for token in kept]
            has["top-p sizes"] = np.diff(np.asarray(sample.rollout_top_p_token_offsets)).tolist()
            wanted["top-p sizes"] = [len(kept) for kept in told.top_p]
        return self.differs_so_far() | _unlike(has, wanted)

    @property
    def _text(self) -> str:
        told = self.wanted
        if told.pieces is not None:
            return "".join(told.pieces)
        ids = told.token_ids
        if ids and ids[-1] == (told.finish or {}).get("matched") and not self.params.get("no_stop_trim"):
            ids = ids[:-1]  # an engine does not show the token at which it stopped
        return self._tokenizer.decode(ids, skip_special_tokens=self.params.get("skip_special_tokens", True))

    @property
    def _came_in_one(self) -> bool:
        brought = [generation for generation in self._generations if len(generation.token_ids)]
        return len(brought) == 1 and brought[0].finish_reason in ENDS


def _has_all_some_twice(shown: str, text: str) -> bool:
    """Whether what was shown is the text, of which characters were sent again after they had been sent."""
    sent = 0
    for character in shown:
        if text[sent : sent + 1] == character:
            sent += 1
        elif character not in text[:sent]:
            return False
    return sent == len(text)


def _unlike(has: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: (has[name], value) for name, value in wanted.items() if has[name] != value}


def work_of(site: Site, index: int) -> Work:
    """A sample of its own kind for each index: prompts and parameters of many sorts."""
    dice = random.Random(f"{site.wire.name} {index}")
    tells_text = "skip_tokenizer_init" not in site.wire.engine
    prompt = dice.choices(range(300, 500), k=dice.randint(1, 6))
    if tells_text:  # some prompts end in the middle of a character
        prompt += dice.choice([[], [], [], [0xF0, 0x9F], [0xE4]])
    most = dice.randint(1, 60)
    params: dict[str, Any] = {"max_new_tokens": most, "temperature": 1, "sampling_seed": index}
    params |= dice.choice([{}, {}, {"temperature": 0}, {"ignore_eos": True}, {"skip_special_tokens": False}])
    ends: list[dict[str, Any]] = [{"min_new_tokens": min(9, most)}, {"stop_token_ids": [310, 330]}]
    params |= dice.choice([{}, {}, *ends, {"no_stop_trim": True}])
    if index % 3 == 2 and site.wire.tells_side_data:
        params |= TOP_P
    if index % 5 == 4 and tells_text:
        # A stop string that is there: two words of the response, so that a cut may come between them.
        words = "".join(site.one.undisturbed(prompt, params).pieces or []).split(" ")
        at = dice.randrange(len(words))
        if all(word.isascii() and word.isalpha() for word in words[at : at + 2]):
            params["stop"] = [" ".join(words[at : at + 2]), "never"]
    return Work(site, Sample(group_index=index, index=index, tokens=prompt), params)


WAYS = ("cancel", "cancel twice", "abort", "flag", "time limit")


@dataclass
class Cutter:
    """Ends a task that completes a sample, in one of our ways."""

    client: Watched
    dice: random.Random
    flag: asyncio.Event = field(default_factory=asyncio.Event)

    async def cut(self, task: asyncio.Task[Any], how: str) -> None:
        if how == "flag":
            self.flag.set()
        elif how == "abort":
            if task in self.client.latest:
                await self.client.latest[task].abort()
        elif how == "time limit":
            with contextlib.suppress(asyncio.TimeoutError, StreamfoldError):
                await asyncio.wait_for(task, 0.001)
        else:
            task.cancel()
            if how == "cancel twice":
                await asyncio.sleep(self.dice.uniform(0, 0.01))
                task.cancel()


async def carry(work: Work, client: Watched, ends: set[int]) -> None:
    """Bring a sample to its end, and cut it on the way up to five times: at any moment, in any way."""
    sample, dice = work.sample, random.Random(work.sample.index)
    cuts = dice.choice([0, 0, 1, 2, 3, 5])
    while sample.status not in ENDS.values():
        cutter = Cutter(client, dice)
        options = CompletionOptions(stop_ids=ends, aborted=cutter.flag.is_set, on_generation=work.note)
        task = asyncio.ensure_future(complete(client, sample, work.params, options=options))
        if cuts > 0:
            cuts, how = cuts - 1, dice.choice(WAYS)
            await asyncio.wait({task}, timeout=dice.uniform(0, dice.choice([0.01, 0.12, 0.12, 0.12])))
            work.cuts[how] += not task.done()
            await cutter.cut(task, how)
        await asyncio.wait({task})
        client.latest.pop(task, None)
        error = None if task.cancelled() else task.exception()
        # With the flag up nothing is tried again, whatever it was that went wrong. Chance may damage three calls alike.
        is_expected = isinstance(error, StreamfoldError) and (cutter.flag.is_set() or "3 calls in a row" in str(error))
        if error is not None and not is_expected:
            raise error
        assert not (wrong := work.differs_so_far()), wrong
