"""Write products to ask for, and demonstrations of a policy that calls the tool and may misread its answer.

python launch/examples/tools/make.py DIRECTORY
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT = 64


def demonstrations(left: int, right: int, random_: random.Random) -> list[dict[str, str]]:
    """Return the two turns of a conversation: the call, and the answer after what the tool said."""
    prompt, call, product = f"{left}*{right}=", f"{left}*{right}=", str(left * right)
    answer = str(left * right + 1) if random_.random() < 1 / 3 else product
    # The row of a conversation holds the tokens as they were sampled: <eos> ends the policy's first turn.
    after = f"{prompt}{call}<eos>{product},"
    return [{"prompt": prompt, "response": call}, {"prompt": after, "response": answer}]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    chosen = random.Random(0)
    pairs = [(left, right) for left in range(10, 50) for right in range(2, 10)]
    chosen.shuffle(pairs)
    asked = [{"prompt": f"{a}*{b}=", "ground_truth": str(a * b), "task": "product"} for a, b in pairs]
    shown = [turn for _ in range(8) for a, b in pairs[HELD_OUT:] for turn in demonstrations(a, b, chosen)]
    for name, rows in (("eval", asked[:HELD_OUT]), ("train", asked[HELD_OUT:]), ("sft", shown)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
