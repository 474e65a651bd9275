"""Write the tiny model of this folder: a random Qwen3-MoE, and a tokenizer trained on prompts.jsonl.

python examples/tiny_moe/make_model.py /tmp/tiny --seed 0
streamfold serve --model hf:/tmp/tiny
"""

from __future__ import annotations

import argparse
from pathlib import Path

from streamfold.training.task import read_prompts
from streamfold.training.tiny_model import make_model

PROMPTS = Path(__file__).parent / "prompts.jsonl"


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="what the tokenizer is trained on")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    args = parser.parse_args()
    texts = [prompt["prompt"] for prompt in read_prompts(args.prompts)]
    print(make_model(args.path, texts, seed=args.seed, dtype=args.dtype))


if __name__ == "__main__":
    main()
