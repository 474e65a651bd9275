"""Writes a reply as the events of vLLM's ``/v1/completions`` with ``return_token_ids``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfold.loopback.vllm.wire import LOWEST_LOGPROB, ResponseOptions, VllmFormat, VllmWriter

if TYPE_CHECKING:
    from streamfold.loopback.core.reply import Frame, Reply

__all__ = ["CompletionWriter"]


class CompletionWriter(VllmWriter):
    """Writes the events of one completion; with token ids if the reply has ``prompt_token_ids``.

    Its id is the reply's without the suffix that numbers the prompts of one body.
    """

    def __init__(
        self, reply: Reply, wire_format: VllmFormat, options: ResponseOptions, model: str, *, ids_as_text: bool = False
    ) -> None:
        super().__init__(reply, wire_format, options)
        self._model = model
        self._ids_as_text = ids_as_text
        self._created = int(self._clock())
        self._offset = 0  # characters sent

    @property
    def _is_dropped(self) -> bool:
        return not self.reply.token_ids and self._format.release < (0, 33)  # taken for a part of the prefill

    def whole(self, model: str) -> Frame:
        """Return the body of an unstreamed reply, as an object."""
        choice = self._choice(slice(0, len(self.reply.token_ids)), last=True)
        usage = self._usage(len(self.reply.token_ids), details=True)
        frame = {**self._head, "model": model, "choices": [choice]}
        return frame | {"system_fingerprint": self._fingerprint, "usage": usage}

    def _frame(self, tokens: int, *, last: bool) -> Frame:
        part = slice(self.sent, tokens)
        self._events += 1
        frame = {**self._head, "choices": [self._choice(part, last=last)]}
        self.sent = tokens
        if last:
            frame["system_fingerprint"] = self._fingerprint
        if self._options.continuous_usage:
            frame["usage"] = self._usage(tokens, details=False)
        return frame

    def _usage_frame(self) -> Frame:
        usage = self._usage(len(self.reply.token_ids), details=True)
        return {**self._head, "choices": [], "system_fingerprint": self._fingerprint, "usage": usage}

    @property
    def _head(self) -> Frame:
        rid = self.reply.rid.rpartition("-")[0]
        return {"id": rid, "object": "text_completion", "created": self._created, "model": self._model}

    @property
    def _fingerprint(self) -> str:
        return f"vllm-{self._format.version}-loopback"

    def _choice(self, part: slice, *, last: bool) -> Frame:
        reply = self.reply
        finish = (reply.finish or {}) if last else {}
        text = self._text(part)
        return {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(part),
            "finish_reason": finish.get("type"),
            "stop_reason": finish.get("matched"),
            "prompt_token_ids": reply.prompt_token_ids if self._events <= 1 else None,
            "token_ids": None if reply.prompt_token_ids is None else reply.token_ids[part],
        }

    def _logprobs(self, part: slice) -> Frame | None:
        reply = self.reply
        if reply.logprobs is None or reply.top_logprobs is None or reply.logprob_texts is None:
            return None
        offsets, names, tops = [], [], []
        for i in range(part.start, part.stop):
            row = reply.top_logprobs[i]
            labels = [self._label(reply.logprob_texts[i], row[0][1])]
            labels += [self._label(self._options.decode(token), token) for _, token in row[1:]]
            offsets.append(self._offset)
            names.append(labels[0])
            # Keyed by text: candidates with the same text are merged.
            tops.append({label: _clamped(logprob) for label, (logprob, _) in zip(labels, row, strict=True)})
            self._offset += len(labels[0])
        sampled = [_clamped(logprob) for logprob in reply.logprobs[part]]
        return {"text_offset": offsets, "token_logprobs": sampled, "tokens": names, "top_logprobs": tops}

    def _label(self, text: str, token: int) -> str:
        return f"token_id:{token}" if self._ids_as_text else text


def _clamped(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
