"""The text that SGLang shows of a response, the slow and obvious way, with any tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamfold import Tokenizer

HALF = "\ufffd"


def shown_texts(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    ids: Sequence[int],
    counts: Sequence[int],
    *,
    skip: bool = True,
    matched: int | str | None = None,
    no_stop_trim: bool = False,
) -> Iterator[str]:
    """All text at each event: new text is what decoding the new tokens too adds.

    What is decoded begins ``start`` tokens into prompt and response, ``read`` are those whose text is settled. Text
    that ends in half a character is not: only its whole words are sent. Each event sends what lies behind the length of
    the text that was visible before, which may be shorter than that of an earlier one: then characters repeat.

    Args:
        tokenizer: of the model.
        prompt: ids.
        ids: of the response, which is finished.
        counts: tokens of the response at each event; the last one has all.
        skip: whether special tokens are skipped.
        matched: the stop token or string at which it stopped.
        no_stop_trim: whether that is shown.
    """
    tokens, settled, sent, shown = [*prompt, *ids], "", 0, ""
    start, read = max(len(prompt) - 5, 0), len(prompt)
    for count in counts:
        end, last = len(prompt) + count, count == counts[-1]
        kept = end - (last and matched == tokens[-1] and not no_stop_trim)
        before = tokenizer.decode(tokens[start:read], skip_special_tokens=skip)
        new = tokenizer.decode(tokens[start:kept], skip_special_tokens=skip)[len(before) :]
        if last:
            visible = settled + new
            if isinstance(matched, str) and (at := visible.find(matched)) >= 0:
                visible = visible[: at + len(matched) if no_stop_trim else at]
        elif new and not new.endswith(HALF):
            settled += new
            visible, start, read = settled, read, end
        else:
            visible = settled + _printable(new)
        shown, sent = shown + visible[sent:], len(visible)
        yield shown


def _printable(text: str) -> str:
    is_behind_cjk = "\u4e00" <= text[-2:-1] <= "\u9fff" or text[-2:-1] == "𠮷"
    return text[:-1] if is_behind_cjk else text[: text.rfind(" ") + 1]
