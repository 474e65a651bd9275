"""vLLM: requests to its token endpoint or ``/v1/completions``, aborts, number of running and waiting requests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from streamfold.engines.base import (
    ALL_TOKENS,
    EngineSpec,
    LoadMissing,
    Pausing,
    asks_top_p,
    check_finite,
    read_json,
    with_extra,
)
from streamfold.engines.parameters import VLLM, VLLM_COMPLETIONS
from streamfold.errors import EngineError, StreamTruncated, quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold.engines.base import Ids, Post, RequestOptions
    from streamfold.errors import StreamfoldError

__all__ = ["Vllm", "VllmCompletions"]

# Usage in each event, so that a lost event is detected at the next one, and before an abort. It costs the server CPU.
_STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Vllm(EngineSpec):
    """vLLM's token endpoint ``/inference/v1/generate``, 0.20 and newer; from 0.30 on the server needs a flag for it.

    Sampling parameters may have SGLang's or vLLM's names: ``max_new_tokens``, ``min_new_tokens``, ``sampling_seed`` and
    ``no_stop_trim`` are sent under vLLM's.
    """

    name = "vllm"
    dialect = "vllm"
    path = "/inference/v1/generate"
    rid_key = "request_id"
    session_header = "X-Session-ID"
    rank_name = "data_parallel_rank"
    loads: ClassVar[tuple[str, ...]] = ("/metrics", "/load")
    load_flags: ClassVar[Mapping[str, str]] = {"/load": "--enable-server-load-tracking"}
    # With several API servers, an abort of all reaches only the requests of the one that it is posted to.
    pausing: ClassVar[Pausing | None] = Pausing("/is_paused", "/pause?mode=abort&clear_cache=false", "/resume")
    known_params: ClassVar[frozenset[str]] = VLLM
    abort_by_disconnect = True
    lists_aborts = True
    reports_stop_token = False
    tells_text = False
    stops_after_minimum = True
    sends_unrequested_side_data = True
    # repetition_penalty counts the prompt too
    resets_penalties: ClassVar[tuple[str, ...]] = ("frequency_penalty", "presence_penalty")
    # for the weight versions: the event comes at once, if the abort has reached the right process
    abort_drain: ClassVar[float] = 0.1
    side_data_needs: ClassVar[Mapping[str, str]] = {
        "routed_experts": "start the server with --enable-return-routed-experts",
        "top_p": "start vLLM 0.32 or newer with --return-sampling-mask",
        "prompt_token_ids": "vLLM 0.30 or newer sends them",
    }

    _RENAMED: Final = {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "no_stop_trim": "include_stop_str_in_output",
    }
    aliases: ClassVar[Mapping[str, str]] = {theirs: ours for ours, theirs in _RENAMED.items()}
    # vLLM ignores unknown sampling parameters silently.
    _UNKNOWN: Final = ("beam_width", "ebnf", "json_schema", "regex", "stop_regex", "structural_tag")

    def unknown_params(self, sampling_params: Mapping[str, Any]) -> list[str]:
        """Those under SGLang's names are known; nulls are not sent."""
        given = {name: value for name, value in sampling_params.items() if value is not None}
        return [name for name in super().unknown_params(given) if name not in self._RENAMED]

    def budget(self, sampling_params: Mapping[str, Any]) -> int | None:
        """Require ``max_new_tokens``: without it some releases stop at 16 tokens, others at the end of the context."""
        budget = super().budget(self.normalize_params(sampling_params))
        if budget is None:
            raise ValueError("max_new_tokens must be given: vLLM's own default is 16 in some releases")
        return budget

    def payload(
        self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: RequestOptions
    ) -> dict[str, Any]:
        """Build the payload. Sampling masks and routed experts are server flags, not request keys."""
        params = self._params(sampling_params)
        if asked.logprobs:
            params.setdefault("logprobs", 1)
        if asked.experts_start:
            params["routed_experts_prompt_start"] = asked.experts_start
        payload: dict[str, Any] = {"request_id": asked.rid}
        if input_ids is not None:
            payload["token_ids"] = input_ids
        elif "token_ids" not in (asked.extra or {}):
            raise ValueError("vLLM's token endpoint takes token ids only: pass input_ids, or token_ids in extra")
        if asked.prompt_token_ids:
            payload["return_token_ids"] = True
        return with_extra({**payload, "sampling_params": params, **_STREAMED}, asked.extra)

    def _params(self, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters under vLLM's names, without nulls."""
        params: dict[str, Any] = {}
        for name, value in self.normalize_params(check_finite(sampling_params)).items():
            if name in self._UNKNOWN and value is not None:
                raise ValueError(
                    f"vLLM has no sampling parameter {name} and would ignore it silently: use structured_outputs"
                )
            known = self._RENAMED.get(name, name)
            keeps_all = known == "top_k" and not (value == -1 or 0 < (value or 0) < ALL_TOKENS)
            if value is not None and known != "custom_params" and not keeps_all:
                params[known] = value
        return {**params, "n": 1}

    def may_be_abort(self, error: StreamfoldError) -> bool:
        """``[DONE]`` alone (token endpoint to 0.31, completions to 0.32); the Rust frontend's server error."""
        is_done = isinstance(error, StreamTruncated) and error.done
        return is_done or (isinstance(error, EngineError) and error.code == "server_error")

    def headers(self, rid: str) -> dict[str, str]:
        """The request id; vLLM prefers the header to the payload's."""
        return {"X-Request-Id": rid}

    def to_rank(self, dp_rank: int | None) -> tuple[dict[str, str], dict[str, Any]]:
        """A header (0.22 and newer)."""
        return {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}, {}

    def hint(self, status: int) -> str:
        """For 403 and 404: name the missing server flag."""
        if status == 403:
            return "start the server with --enable-scale-out, or use engine='vllm-completions'"
        if status == 404:
            return (
                f"does the server have {self.path}? It needs vLLM 0.20, from 0.30 on --enable-scale-out; "
                "engine='vllm-completions' needs neither"
            )
        return ""

    def aborts(self, rids: Sequence[str]) -> Sequence[tuple[str, Sequence[dict[str, Any]]]]:
        """The endpoint of newer releases, then the one of the dev mode. The Rust frontend adds no prefix to ids."""
        return self._aborts([shown for rid in rids for shown in (f"generate-tokens-{rid}", rid)])

    def _aborts(self, ids: list[str]) -> Sequence[tuple[str, Sequence[dict[str, Any]]]]:
        return [(path, [{"request_ids": ids}]) for path in ("/inference/v1/abort_requests", "/abort_requests")]

    def aborts_all(self) -> Sequence[Post]:
        """One POST, which only the dev mode has; no other endpoint aborts all requests."""
        return [("/abort_requests", {})]

    def read_load(self, reply: bytes) -> int:
        """Read the two gauges of ``/metrics``, or the count of ``/load``."""
        gauges = re.findall(rb"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? +([0-9.e+]+)", reply, re.MULTILINE)
        if gauges:
            return round(sum(map(float, gauges)))
        if not reply.lstrip().startswith((b"{", b"[", b'"', b"<")):  # metrics, but not these two
            raise LoadMissing("/metrics has none of vLLM's gauges: was the server started with --disable-log-stats?")
        report = read_json(reply)
        load = report.get("server_load") if isinstance(report, dict) else None
        if not isinstance(load, int):
            raise EngineError(f"the engine's load is of an unknown shape: {quote(reply)}")
        return load

    def read_waiting(self, reply: bytes) -> int:
        """Read the gauge of ``/metrics``; ``/load`` tells only the sum."""
        gauges = re.findall(rb"^vllm:num_requests_waiting(?:\{.*\})? +([0-9.e+]+)", reply, re.MULTILINE)
        return round(sum(map(float, gauges)))


class VllmCompletions(Vllm):
    """vLLM's ``/v1/completions`` with ``return_token_ids``: needs no server flag; no routed experts, no masks."""

    name = "vllm-completions"
    dialect = "vllm-completions"
    path = "/v1/completions"
    known_params: ClassVar[frozenset[str]] = VLLM_COMPLETIONS
    delays_text = True
    tells_text = True

    def payload(
        self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: RequestOptions
    ) -> dict[str, Any]:
        """Build the payload of ``/v1/completions``."""
        if asked.top_p or asks_top_p(sampling_params) or asked.experts is not None:
            raise ValueError("/v1/completions streams neither sampling masks nor routed experts: use engine='vllm'")
        params = self._params(sampling_params)
        if asked.logprobs:
            params.setdefault("logprobs", 1)
        prompt: Any = input_ids
        rest = dict(asked.extra or {})
        if input_ids is None:
            prompt = rest.pop("text", rest.pop("prompt", None))
            if prompt is None:
                raise ValueError("the request has no prompt: pass input_ids, or text in extra")
        payload = {"request_id": asked.rid, "prompt": prompt, **params, "return_token_ids": True, **_STREAMED}
        return with_extra(payload, rest)

    def hint(self, status: int) -> str:
        """None: this endpoint needs no flag."""
        del status
        return ""

    def aborts(self, rids: Sequence[str]) -> Sequence[tuple[str, Sequence[dict[str, Any]]]]:
        """The id of the request's only prompt."""
        return self._aborts([shown for rid in rids for shown in (f"cmpl-{rid}-0", f"cmpl-{rid}")])
