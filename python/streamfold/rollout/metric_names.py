"""The names of all metrics, and what they mean. ``python -m streamfold.rollout.metric_names`` prints a table."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["METRICS", "markdown_table"]

_PERCENTILES: Final = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
_TIMES: Final = {
    "ttft": "time to first token of the calls that ended, in seconds from sending the request",
    "itl": "time from one token to the next over all calls that ended, in seconds; tokens of one read share it evenly, "
    "those of a call's first read have none",
    "latency": "time from sending a request to its last token, in seconds, of calls that the engine has finished",
}

METRICS: Final[dict[str, str]] = {
    "groups/done": "groups given to the trainer",
    "groups/aborted": "groups that were unfinished when the rollout ended",
    "groups/put_back": "of all unfinished groups, those returned to the source",
    "groups/fresh": "of those, groups without a token",
    "groups/kept": "finished groups beyond the batch, returned for the next rollout",
    "groups/failed": "groups whose generate or reward function raised",
    "groups/stale": "groups that were restarted because of `max_staleness`",
    "groups/dropped": "groups that were dropped",
    "groups/dropped/<reason>": "of those, by reason: the filter's or `filter`, `stale`, `aborted`, `surplus`, `failed`",
    "groups/drawn": "groups taken from the source",
    "samples/started": "generations that were started",
    "samples/resumed": "of those, ones that continued a response of an earlier rollout",
    "samples/retried": "generations started again after the generate function had raised",
    "samples/timed_out": "samples truncated at `sample_seconds`",
    "samples/aborted_ratio": "share of the samples in groups that ended here which were unfinished, 0 to 1",
    "samples/truncated_ratio": "share of the samples given to the trainer that are TRUNCATED, 0 to 1",
    "tokens/generated": "tokens received, lost ones included",
    "tokens/kept": "of those, tokens of unfinished samples that a later rollout resumes",
    "tokens/lost": "tokens dropped: their side data did not come, or their sample was restarted",
    "tokens/stale": "tokens older than `max_staleness` in groups given to the trainer",
    "tokens_per_second": "`tokens/generated` by `seconds`",
    **{f"{name}/{percentile}": f"{word}: {meaning}" for name, meaning in _TIMES.items()
       for percentile, word in _PERCENTILES.items()},
    "response_length/mean": "response tokens of the samples given to the trainer, on average",
    "response_length/max": "the longest response",
    "reward/mean": "rewards of the samples given to the trainer, on average; rewards that are dicts are left out",
    "reward/std": "their standard deviation",
    "reward/max": "the highest reward",
    "rewards": "rewards that were computed",
    "resumes": "samples resumed after their stream had broken off",
    "resumed_penalties": "calls that continued a response whose penalties the engine then counted anew",
    "retries": "requests repeated before their first token",
    "seconds": "duration of the rollout, or of the time since a pool's metrics were last read",
    "abort_seconds": "of those, spent in aborts",
    "longest_pause": "longest time for which the event loop was blocked, in seconds",
    "staleness/mean": "rollouts (in a pool: weight versions) from a group's start to its end, on average",
    "staleness/max": "the most",
    "source_dry": "1 if the source had too few groups",
    "drawn_out": "1 if `max_groups_drawn` groups were too few",
}  # fmt: skip
"""Without their prefix ``streamfold/``."""


def markdown_table() -> str:
    """The table of docs/metrics.md."""
    rows = [("metric", "meaning"), ("---", "---")]
    rows += [(f"`streamfold/{name}`", meaning) for name, meaning in METRICS.items()]
    return "".join(f"| {name} | {meaning} |\n" for name, meaning in rows)


if __name__ == "__main__":
    sys.stdout.write(markdown_table())
