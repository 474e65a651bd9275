"""Stop a response by a rule of your own: when it repeats itself, or when its thought is longer than its budget.

What stops it is one abort, and what follows is one more call: behind the thought comes the token that ends it, and then
the answer. Run it against any SGLang server whose model thinks, with the id of its token, or against the loopback
engine:

    streamfold serve &
    python examples/stop_by_rule.py http://127.0.0.1:30000
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from streamfold import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from streamfold import Call, Generation

PROMPT = list(b"How many stations has the line? <think>")  # token ids
END_OF_THOUGHT = 261  # </think>, with the loopback engine's tokenizer
THOUGHT, ANSWER = 48, 24  # budgets, in tokens
EVERY = 16  # tokens from one look to the next


async def stop_when(call: Call, is_enough: Callable[[npt.NDArray[np.int32]], bool]) -> Generation:
    """Look at a call's tokens, a number of them at a time, and abort it when there is enough."""
    seen = 0
    while await call.wait_tokens(seen + EVERY) >= seen + EVERY:  # fewer: it has ended
        ids = call.token_ids()
        if is_enough(ids):
            return await call.abort()
        seen = len(ids)
    return await call


def repeats(ids: npt.NDArray[np.int32], longest: int = 16, times: int = 4) -> bool:
    """Whether the tokens end with the same phrase, several times over."""
    return any(
        len(ids) >= times * size and bool((ids[-times * size :].reshape(times, size) == ids[-size:]).all())
        for size in range(1, longest + 1)
    )


def thinks_too_long(ids: npt.NDArray[np.int32]) -> bool:
    """Whether the thought is as long as it may be, and has not ended."""
    return len(ids) >= THOUGHT and END_OF_THOUGHT not in ids


async def main(url: str) -> None:
    """Generate a thought within its budget, and the answer that follows it."""
    params = {"temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    async with Client(url) as client:
        call = client.start(PROMPT, {**params, "max_new_tokens": 2_000})
        part = await stop_when(call, lambda ids: repeats(ids) or thinks_too_long(ids))
        if END_OF_THOUGHT in part.token_ids:
            print(f"it ended its thought by itself: {part.text!r}")
            return
        thought = part.token_ids[:THOUGHT].tolist()
        print(f"stopped after {len(thought)} tokens of thought")
        answer = await client.generate(
            [*PROMPT, *thought, END_OF_THOUGHT], {**params, "max_new_tokens": ANSWER, "ignore_eos": False}
        )
        print(f"answered ({answer.finish_reason}): {answer.text!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
