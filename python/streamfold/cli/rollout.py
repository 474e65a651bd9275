"""``streamfold rollout``: generates n samples for each prompt of a file on an engine, and resumes if it is rerun."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from streamfold.cli.console import fail
from streamfold.cli.files import check_different
from streamfold.cli.journal import Journal, Plan
from streamfold.cli.options import (
    EXPERTS_HELP,
    experts_option,
    extra_option,
    headers_option,
    params_option,
    reward_option,
    timeouts_option,
    tokenizer_option,
)
from streamfold.cli.printing import AsJson, Quiet, Verbose, output
from streamfold.cli.rollout_job import RolloutJob, report, show
from streamfold.client.client import Client
from streamfold.client.limits import Limits, Retries
from streamfold.client.trace import Trace
from streamfold.engines.detect import ENGINES
from streamfold.errors import EngineError
from streamfold.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from streamfold._core import Experts

__all__ = ["command"]

_SAMPLING: Final = "Sampling"
_REQUESTS: Final = "Requests"
_SECONDS: Final = "SECONDS|none"
_DEFAULT_MAX_NEW_TOKENS: Final = 1024


def command(
    url: Annotated[str, typer.Option(help="URL of the engine or router, such as http://10.0.0.1:30000.")],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help='File of prompts, one JSON object per line, with "prompt" (text, or a list of chat messages), '
            '"input_ids", or both: then the ids are sent. "image_data": images, for SGLang. -: standard input.',
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            dir_okay=False,
            help="File for the samples, finished and partial ones, one JSON object per line. Finished samples in it "
            "are not generated again.",
        ),
    ],
    engine: Annotated[
        Literal["sglang", "vllm", "vllm-completions", "auto"],
        typer.Option(
            help="Endpoint: sglang: /generate; vllm: /inference/v1/generate; vllm-completions: /v1/completions; "
            "auto: ask the server which engine it is."
        ),
    ] = "sglang",
    n_samples_per_prompt: Annotated[
        int, typer.Option("--n-samples-per-prompt", "-n", min=1, help="Samples per prompt.")
    ] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Samples in flight at the same time.")] = 64,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Tokens per response at most. Default: as in --sampling-params, or {_DEFAULT_MAX_NEW_TOKENS}.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sampling temperature; 0: greedy. Default: the engine's.", rich_help_panel=_SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Probability mass to sample from. Default: the engine's.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample only from the K most likely tokens; -1: from all. Default: the engine's.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="String that ends a response. May be repeated. Default: none.", rich_help_panel=_SAMPLING),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Sample i of the whole run is sampled with seed SEED + i. Default: the engine chooses.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    sampling_params: Annotated[
        str | None,
        typer.Option(
            help="JSON object of sampling parameters under the engine's names. The options above override it.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    extra: Annotated[
        str | None,
        typer.Option(
            help="JSON object of further keys of each request: a LoRA adapter (SGLang lora_path, vLLM model), "
            "priority, cache_salt. Default: none.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="Header of each request, as NAME=VALUE. May be repeated. Default: none.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs/--no-logprobs", help="Request log-probabilities.", rich_help_panel=_REQUESTS)
    ] = True,
    experts: Annotated[
        str | None,
        typer.Option(
            help=f"Request routed experts. {EXPERTS_HELP} Needs prompt token ids: input_ids or --tokenizer. "
            "Default: not requested.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    arrays: Annotated[
        Literal["lists", "npz"],
        typer.Option(help="Where per-token data goes: lists in the line, or an .npz file per sample in OUT.arrays/."),
    ] = "lists",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Name or folder of a transformers tokenizer. It encodes prompts without input_ids, texts and chat "
            "messages, and decodes resumed responses as a whole: without it a character that an interruption split "
            "may be damaged in their text. Default: the engine encodes and decodes."
        ),
    ] = None,
    prompt_token_ids: Annotated[
        bool,
        typer.Option(
            "--prompt-token-ids",
            help="Request the ids of text prompts, so that partial samples are resumed instead of restarted. "
            "Costs bandwidth: SGLang repeats them in each event. Not needed with --tokenizer.",
        ),
    ] = False,
    eos_token_id: Annotated[
        list[int] | None,
        typer.Option(
            help="EOS token id, in addition to the EOS of --tokenizer. A response that ends with it is "
            "finished, even if its request was aborted there. May be repeated. Default: none.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Reward function, async or not: takes a finished sample (prompt, response, label, metadata), and "
            "returns a number, or a dict with numbers. The module may lie in the current folder. Finished samples of "
            "OUT that have no reward get one. Default: none.",
        ),
    ] = None,
    tries: Annotated[
        int,
        typer.Option(
            min=1, help="Requests per sample at most: the first one, retries and resumes.", rich_help_panel=_REQUESTS
        ),
    ] = 6,
    trace: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="File for a trace of all calls, which ui.perfetto.dev opens. A trace that is there is replaced, any "
            "other file is not. Default: none.",
        ),
    ] = None,
    timeout_connect: Annotated[
        str | None, typer.Option(metavar=_SECONDS, help="To open a connection. Default: 10.", rich_help_panel=_REQUESTS)
    ] = None,
    timeout_first_token: Annotated[
        str | None,
        typer.Option(
            metavar=_SECONDS,
            help="From a request to its first token: queue and prefill. Default: 600, and once more as long if "
            "requests wait at the engine.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    timeout_next_token: Annotated[
        str | None,
        typer.Option(metavar=_SECONDS, help="From one token to the next. Default: 300.", rich_help_panel=_REQUESTS),
    ] = None,
    timeout_drain: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="How long an abort reads on for routed experts and top-p ids, which come with the last event. "
            "Default: 2.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Bearer token to send. Default: none.", envvar="STREAMFOLD_API_KEY", rich_help_panel=_REQUESTS
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Generate n samples for each prompt of a file, and write each one when it is finished, as a line of JSON.

    Rerun the same command to resume after an interruption. Finished samples are
    kept. Partial ones are resumed from their tokens, or restarted if the token
    ids of their prompt are unknown. Ctrl-C, SIGTERM and SIGHUP save what was received.
    Tokens and log-probabilities of a resumed sample are exact; its text is too with
    --tokenizer, otherwise the sample's metadata has streamfold_text_joined.

    Exits with 0 if all samples are finished, with 130 after one of these signals,
    otherwise with 1.
    """
    overrides = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or None,
    }
    started_at = time.monotonic()
    try:
        _check_files(prompts, out, trace)
        decoder, encode, stop_ids = tokenizer_option(tokenizer)
        params = _sampling_params(params_option(sampling_params), overrides)
        plan = Plan(prompts, params, n=n_samples_per_prompt, seed=seed, encode=encode)
        shape = experts_option(experts)
        judge = reward_option(reward)
        _check_prompts(plan, engine, shape)
        timeline = None if trace is None else Trace(trace)
        client = Client(
            url,
            engine=engine,
            api_key=api_key,
            extra=extra_option(extra, engine),
            headers=headers_option(header or ()),
            tokenizer=decoder,
            timeouts=timeouts_option(
                connect=timeout_connect,
                first_token=timeout_first_token,
                next_token=timeout_next_token,
                drain=timeout_drain,
            ),
            limits=Limits(calls=concurrency),
            retries=Retries(tries=tries),
            experts=shape,
            trace=timeline,
        )
        config = RolloutConfig(
            groups=1,
            concurrency=concurrency,
            partial_rollout=True,
            sample_retries=0,
            stop_ids=(*stop_ids, *(eos_token_id or ())),
            logprobs=logprobs,
            prompt_token_ids=prompt_token_ids,
        )
        with Journal(out, plan, arrays, needs_reward=judge is not None) as journal:
            job = RolloutJob(client, plan, journal, config, judge)

            def start() -> Coroutine[Any, Any, None]:
                _check_prompts(plan, client.engine, shape)  # which is known now, also with auto
                return job.run()

            with output(verbose=verbose, quiet=quiet):
                try:
                    interrupted = asyncio.run(show(job, start, quiet=quiet))
                except KeyboardInterrupt:  # of a reward function: signals cancel a task instead
                    interrupted = True
            if timeline is not None:
                timeline.close()
    except (OSError, ValueError, EngineError) as error:  # EngineError: with auto, the engine could not be found out
        fail(str(error))
    with output(quiet=quiet):
        report(job, out, interrupted=interrupted, seconds=time.monotonic() - started_at, as_json=as_json)


def _check_files(prompts: Path, out: Path, trace: Path | None) -> None:
    """Check that no file is two of these, before any is read or written.

    Raises:
        ValueError: one is.
    """
    read = None if str(prompts) == "-" else prompts
    check_different(prompts=read, out=out, trace=trace)
    rewritten = out.with_name(f"{out.name}.new")  # while lines are removed from the samples
    check_different(prompts=read, out=rewritten, trace=trace)


def _sampling_params(params: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    default = {} if "max_tokens" in params else {"max_new_tokens": _DEFAULT_MAX_NEW_TOKENS}
    return {**default, **params, **{name: value for name, value in overrides.items() if value is not None}}


def _check_prompts(plan: Plan, engine: str, experts: Experts | None) -> None:
    """Refuse prompts without ids where ids are needed, and images where they cannot be sent.

    Raises:
        ValueError: there are such prompts.
    """
    if experts is not None and plan.texts:
        raise ValueError(f"--experts: {plan.texts} prompts have no input_ids: add ids, or use --tokenizer")
    if plan.images and engine in ENGINES and ENGINES[engine].image_key is None:
        raise ValueError(f"{plan.images} prompts have image_data, which --engine {engine} does not take: use SGLang")
    if engine == "vllm" and plan.texts:
        raise ValueError(
            f"vLLM's token endpoint only takes ids, but {plan.texts} prompts have none: use --tokenizer, or "
            "--engine vllm-completions"
        )
