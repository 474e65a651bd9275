"""Protocols of the objects that users bring: a trainer's sample (:class:`SampleLike`), a model's :class:`Tokenizer`."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["SampleLike", "Tokenizer"]


class Tokenizer(Protocol):
    """A tokenizer that decodes; those of transformers do.

    It decodes responses whose engine sends no text, and responses that took several calls. The text of other responses
    is compared with that of their tokens, once, when they are finished.
    """

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Decode token ids.

        Args:
            ids: a list of Python integers; it may be empty.
            skip_special_tokens: whether special tokens (EOS, padding) are left out of the text.

        Returns:
            The text. A character of which only some of the tokens are among ``ids`` is decoded as U+FFFD.
        """


class SampleLike(Protocol):
    """A sample that :func:`~streamfold.merge` and :func:`~streamfold.complete` can write: ours, or a trainer's.

    :class:`~streamfold.Sample` implements it. Optional attributes are used where a sample has them:
    ``rollout_top_p_token_ids`` (int32 ``[m]``), ``rollout_top_p_token_offsets`` (int32 ``[response_length + 1]``),
    ``rollout_routed_experts`` (int32 ``[len(tokens) - 1, num_layers, top_k]``) and ``rollout_indexer_topk`` (int32
    ``[len(tokens) - 1, indexer_layers, index_topk]``), each an array or None; ``session_id`` (str or None), by which a
    router keeps the calls of one conversation on one worker. Routed experts may also be a list of tensors, or a
    reference with ``shape`` that ``load()``, or the sample's ``materialize_rollout_routed_experts``, reads. A sample
    must be a plain object with a ``__dict__``, and its class callable without arguments: a restart takes its defaults
    from a new one. One that has ``update_from_meta_info`` instead of ``append_response_tokens``, as miles's, is written
    field by field.

    Attributes:
        index: number of the sample, for messages; None if it has none.
        prompt: text, or chat messages (a list of dicts). Sent only if there are no prompt ids in ``tokens``.
        tokens: ids of the prompt, then of the response.
        response: text of the response.
        response_length: number of response tokens: the last ones of ``tokens``.
        loss_mask: ``[response_length]``, 1 for each token that is trained on, otherwise 0; None: all 1.
        rollout_log_probs: ``[response_length]``, Python floats (double precision), 0.0 for tokens that are not trained
            on; None: not requested.
        status: a member of an enum with the names PENDING, COMPLETED, TRUNCATED and ABORTED. Samples of any other
            status are neither written nor resumed.
        metadata: any JSON-like notes; None counts as empty. streamfold's own keys are listed in
            ``streamfold/samples/metadata.py``. The dict may be shared by several samples: it is copied once, when the
            sample first enters, and changed in place from then on.
    """

    index: int | None
    prompt: Any
    tokens: list[int]
    response: str
    response_length: int
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    status: Any
    metadata: dict[str, Any]

    def append_response_tokens(
        self,
        args: Any,  # noqa: ANN401  # the host's own
        *,
        tokens: list[int],
        log_probs: list[float] | None,
        trainable: bool,
        meta_info: dict[str, Any],
        text: str,
        update_terminal_info: bool,
    ) -> object:
        """Extend the response, and everything beside it, by what one call has generated.

        It may change lists in place (they are copies), and raise anything: :func:`~streamfold.merge` then restores the
        attributes of the sample.

        Args:
            args: the trainer's settings; None with samples of our own.
            tokens: ``[n]``, the new ids.
            log_probs: ``[n]``, one for each of them; None if they were not requested or the tokens are not trained on.
            trainable: whether the new tokens are trained on.
            meta_info: what else the engine reported, under SGLang's keys: ``finish_reason`` (an object with ``type``),
                ``completion_tokens``, ``prompt_tokens``, ``cached_tokens``, ``weight_version``, ``spec_*`` counts;
                ``routed_experts`` (int32 ``[rows, num_layers, top_k]`` of all tokens but the last, old and new, without
                the first ``routed_experts_start_len`` rows, which stay as they are: that key is there only if the class
                of the sample is seen to know it);
                ``top_p_token_ids`` and ``top_p_token_offsets`` of the new tokens (base64 of int32 ``[m]`` and
                ``[n + 1]``). What was not reported is left out.
            text: of the new tokens.
            update_terminal_info: whether ``finish_reason`` decides the status: False if the call was aborted before
                its terminal event.
        """
