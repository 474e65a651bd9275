"""``RolloutConfig``: the settings of ``Rollout`` and ``Pool``, checked when they are given."""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from streamfold.client.arguments import check_kind
from streamfold.client.fields import with_fields
from streamfold.client.limits import check_seconds
from streamfold.client.observer import Observer
from streamfold.engines.base import common_extra
from streamfold.samples.options import ResumePenalties, check_resume_penalties
from streamfold.samples.routing import AUTO, check_routing_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.client.trace import Trace

__all__ = ["RolloutConfig", "Stale"]

Stale = Literal["keep_masked", "keep", "drop", "restart"]

_AT_LEAST_1: Final = (
    "groups", "n_samples_per_prompt", "over_sampling", "concurrency", "starts_per_ms", "reward_threads", "dp_size",
    "group_tries", "max_groups_drawn",
)  # fmt: skip
_AT_LEAST_0: Final = ("max_failures", "max_staleness", "sample_retries")
_REPR: Final = reprlib.Repr()
_MAX_VALUE: Final = 60  # characters of one setting in a repr
_MAX_REPR: Final = 300  # characters of a repr


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How many groups a rollout gives, how they are generated, and what becomes of unfinished ones.

    Attributes:
        sampling_params: under the engine's names, for the whole response of each sample. Copied for each sample.
        groups: how many groups a rollout gives to the trainer.
        n_samples_per_prompt: how many samples each group of the source must have. None: any number.
        over_sampling: how many groups are taken from the source at a time, whenever fewer than ``groups`` are finished
            or in flight. With more than ``groups``, a rollout does not wait for its slowest groups. None: ``groups``.
        concurrency: how many samples are in flight on each engine.
        starts_per_ms: how many samples start in one millisecond at most.
        partial_rollout: whether a response that was aborted at the end of a rollout is resumed in a later one. If not,
            its sample is restarted from the prompt, with every field reset.
        mask_offpolicy: with ``partial_rollout``: set the loss mask of tokens that earlier rollouts generated to 0, in
            each group that is resumed.
        keep_finished: whether finished groups beyond ``groups`` are returned to the source for the next rollout, which
            gives them to the trainer unchanged. If not they are dropped, as some hosts do; and without
            ``partial_rollout`` an aborted group is then restarted as a whole, so that no response is given in a later
            rollout than it was started in.
        group_reward: whether the reward function takes the list of a group's samples and returns a list of rewards. It
            is not called for a group with an unfinished sample.
        reward_threads: how many threads run a reward function that is not ``async`` at the same time.
        abort_seconds: how long the abort at the end of a rollout may take, in seconds: for engines to end their
            requests, for generate functions to return. Then they are cancelled.
        reward_seconds: how long rewards that are being computed at the end of a rollout may take, in seconds from the
            beginning of the abort. Then they are cancelled, and computed in the next rollout. Rewards of groups that
            are going to be dropped, or restarted as a whole, are not waited for.
        resume: what the built-in generate function does when a stream breaks off; see :func:`~streamfold.complete`.
        resume_penalties: what the built-in generate function does with a partial response if its sampling has a
            penalty that the engine counts anew in each call; see ``CompletionOptions``. ``"continue"`` resumes it all
            the same, and the metric ``streamfold/resumed_penalties`` counts that; ``"restart"`` generates it again.
        logprobs: whether the built-in generate function requests log-probabilities.
        prompt_token_ids: whether it requests the ids of prompts that are text, so that a partial sample is resumed
            instead of restarted; see ``CompletionOptions``.
        extra: further keys of each request of the built-in generate function: a LoRA adapter (SGLang ``lora_path``,
            vLLM ``model``), ``priority``, ``cache_salt``. They come before those of the client.
        headers: of each request of the built-in generate function; they come before those of the client.
        routing_header: the header by which a router keeps all calls of a sample on one worker; see
            ``CompletionOptions``. ``"auto"``: that of the engine's own router; None: none.
        stop_ids: tokens that end a response besides ``stop_token_ids``, such as the tokenizer's EOS token. They matter
            for aborted requests: an engine does not check whether their last token is one of these.
        dp_size: number of data-parallel ranks of each engine. With more than 1 the built-in generate function gives
            each sample the rank with the fewest requests, and keeps it in all calls, turns and rollouts, until
            ``dp_size`` changes or an engine refuses the rank (sent as ``routed_dp_rank`` to SGLang 0.5.10 and newer, in
            a header to vLLM).
        max_staleness: how many rollouts (in a pool: weight versions) may lie between the call that generated a token
            and the batch that it is given in. A pool starts no more groups than can be given in that time; see
            :class:`~streamfold.Pool`. None: no limit.
        stale: what becomes of tokens that are older, of responses that take many rollouts. ``"keep_masked"`` sets their
            loss mask to 0; a group that has no other token is dropped. ``"keep"`` leaves them as they are. ``"drop"``
            drops their whole group. ``"restart"`` restarts it from its prompt; long responses may then never end, and
            what is trained on is biased to short ones. Dropped groups are counted under the reason "stale".
        seed: sample i of each group gets ``sampling_seed = seed + i``. None: the engine chooses.
        sample_seconds: how long one sample may be generated, in seconds, over all rollouts that resume it; waiting for
            a place (``concurrency``) and its reward do not count. Then its generate function is cancelled, and the
            sample is TRUNCATED with the tokens that it has: it gets its reward, and is never resumed. A sample without
            any token fails instead. ``metadata["streamfold_timed_out"]`` and ``streamfold/samples/timed_out`` count it.
            None: no limit.
        sample_retries: how often the generate function is called again for a sample for which it raised an exception
            of its own, before its group fails. With ``partial_rollout`` the sample is resumed, otherwise restarted from
            its prompt. Not called again after ``ValueError`` and ``TypeError``, which would come again, nor after
            errors of streamfold, whose requests were retried already.
        max_failures: how many groups may fail in one rollout. They are returned to the source and retried in the next
            one. With one more the rollout ends with an error, as the groups are not the cause then. None: no limit.
        max_failure_rate: the share of the groups started in one rollout that may fail, 0 to 1, once 16 or more were
            started; of fewer groups a share says little. None: no limit.
        group_tries: after failing in this many rollouts a group is dropped.
        max_groups_drawn: how many groups are taken from the source in one rollout at most. A rollout whose filter drops
            nearly all of them then ends with fewer than ``groups``, and says why. None: no limit.
        progress: whether to show the progress: groups, tokens (those of running calls too), tokens per second, what is
            in flight, aborted and failed, the slowest call, and the time that is left. In a terminal or a notebook as a
            bar or a line that is redrawn; elsewhere, and in a pool, as one line each ten seconds in the log
            (``streamfold.progress``, level INFO).
        trace: what the calls of the rollout and its rewards do is written to it, see :class:`~streamfold.Trace`.

    Raises:
        ValueError: a setting is invalid; the message names it.
        TypeError: ``extra`` cannot be written as JSON.
    """

    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    groups: int
    n_samples_per_prompt: int | None = None
    over_sampling: int | None = None
    concurrency: int = 512
    starts_per_ms: int = 64
    partial_rollout: bool = False
    mask_offpolicy: bool = False
    keep_finished: bool = True
    group_reward: bool = False
    reward_threads: int = 8
    abort_seconds: float = 30.0
    reward_seconds: float = 30.0
    resume: Literal["continue", "restart", "raise"] = "continue"
    resume_penalties: ResumePenalties = "continue"
    logprobs: bool = True
    prompt_token_ids: bool = False
    extra: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    routing_header: str | None = AUTO
    stop_ids: tuple[int, ...] = ()
    dp_size: int = 1
    max_staleness: int | None = None
    stale: Stale = "keep_masked"
    seed: int | None = None
    sample_seconds: float | None = None
    sample_retries: int = 1
    max_failures: int | None = None
    max_failure_rate: float | None = 0.25
    group_tries: int = 3
    max_groups_drawn: int | None = None
    progress: bool = True
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if self.trace is not None:
            check_kind("trace", self.trace, Observer, 'Trace("trace.json")')
        for names, least in ((_AT_LEAST_1, 1), (_AT_LEAST_0, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and (type(value) is not int or value < least):
                    raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        check_seconds("abort_seconds", self.abort_seconds, optional=False)
        check_seconds("reward_seconds", self.reward_seconds, optional=False)
        self._check_limits()
        if self.mask_offpolicy and not self.partial_rollout:
            raise ValueError("mask_offpolicy needs partial_rollout: without it no response is resumed")
        if self.resume not in ("continue", "restart", "raise"):
            raise ValueError(f'resume must be "continue", "restart" or "raise", not {self.resume!r}')
        if self.stale not in get_args(Stale):
            raise ValueError(f"stale must be one of {', '.join(get_args(Stale))}, not {self.stale!r}")
        check_resume_penalties(self.resume_penalties)
        check_routing_header(self.routing_header)
        common_extra(self.extra)
        with_fields((), self.headers)

    def _check_limits(self) -> None:
        check_seconds("sample_seconds", self.sample_seconds, optional=True)
        if self.sample_seconds == 0:
            raise ValueError("sample_seconds must be more than 0, or None for no limit")
        rate = self.max_failure_rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1):
            raise ValueError(f"max_failure_rate must be a share from 0 to 1, or None for no limit, not {rate!r}")
        drawn = self.max_groups_drawn
        if drawn is not None and drawn < self.groups:
            raise ValueError(f"max_groups_drawn is {drawn}, but a rollout needs {self.groups} groups")

    def __repr__(self) -> str:
        """Only the settings that differ from their defaults, shortened."""
        changed = [f"groups={self.groups}"]
        for item in sorted(dataclasses.fields(self), key=lambda item: item.name == "sampling_params"):
            default = {} if item.default is dataclasses.MISSING else item.default
            value = getattr(self, item.name)
            if item.name != "groups" and value != default:
                changed.append(f"{item.name}={_shortened(_REPR.repr(value), _MAX_VALUE)}")
        return f"RolloutConfig({_shortened(', '.join(changed), _MAX_REPR)})"

    @property
    def take_size(self) -> int:
        """How many groups are taken from the source at a time."""
        return self.groups if self.over_sampling is None else self.over_sampling


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
