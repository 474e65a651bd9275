"""Stream from an engine, abort in the middle, and resume from the tokens that were received.

Run it against any SGLang server, or against the loopback engine:

    streamfold serve &
    python examples/stream_and_resume.py http://127.0.0.1:30000
"""

import asyncio
import sys

from streamfold import Client

PROMPT = list(b"A story in which nothing is lost.")  # token ids
BUDGET = 200


async def main(url: str) -> None:
    """Generate a response in two requests, and print both parts."""
    params = {"temperature": 1.0, "sampling_seed": 7}
    async with Client(url) as client:
        call = client.start(PROMPT, {**params, "max_new_tokens": BUDGET})
        await asyncio.sleep(0.5)
        part = await call.abort()
        print(f"kept {len(part.token_ids)} tokens: {part.text!r}")

        left = BUDGET - len(part.token_ids)
        rest = await client.generate([*PROMPT, *part.token_ids.tolist()], {**params, "max_new_tokens": left})
        print(f"resumed with {len(rest.token_ids)} ({rest.finish_reason}): {rest.text!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
