"""Show a response while it is generated.

Run it against the loopback engine:

    streamfold serve --token-rate 20 &
    python examples/stream_text.py http://127.0.0.1:30000

For a real model load its tokenizer: ``transformers.AutoTokenizer.from_pretrained(...)``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from streamfold import Client
from streamfold.loopback import MockTokenizer

if TYPE_CHECKING:
    from streamfold import Call, Tokenizer

PROMPT = "A story that is told word by word."
PARAMS = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 7}


async def show(call: Call, tokenizer: Tokenizer) -> None:
    """Print the text of a call as its tokens come."""
    count, shown = 0, ""
    while (so_far := await call.wait_tokens(count + 1)) > count:
        count = so_far
        text = tokenizer.decode(call.token_ids().tolist(), skip_special_tokens=True)
        text = text.rstrip("\ufffd")  # a character of which only the first tokens have come
        print(text[len(shown) :], end="", flush=True)
        shown = text
    whole = tokenizer.decode((await call).token_ids.tolist(), skip_special_tokens=True)
    print(whole[len(shown) :])


async def main(url: str) -> None:
    """Generate one response, and show it."""
    tokenizer = MockTokenizer()
    async with Client(url) as client:
        call = client.start(tokenizer.encode(PROMPT), PARAMS)
        await show(call, tokenizer)
        print(f"{call.token_count} tokens, the first one after {call.ttft or 0.0:.2f} s")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
