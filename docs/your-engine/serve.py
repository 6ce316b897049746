"""Ask the bundled model a question, with your engine.

    python docs/your-engine/serve.py "What is a KV cache?"

`--solution` uses the solution instead.
"""

import os

# The model is tiny: more than one thread only makes it slower. Set before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from importlib import import_module

from compare import CHECKPOINT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("question")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--solution", action="store_true", help="use the solution, not your engine")
    args = parser.parse_args()
    file = import_module("solution" if args.solution else "your_engine")
    engine = file.Engine(CHECKPOINT, file.Config())
    sampling = {"temperature": args.temperature, "seed": args.seed}
    for piece in engine.chat(args.question, args.max_tokens, **sampling):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
