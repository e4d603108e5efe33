"""Tokens that are no text: write shards of games in which a knight jumps over a chessboard.

    python tests/benchmarks/knight.py
    python train_gpt2.py --quickstart --data_dir knight --log_dir log/knight --max_steps 400 --prompt ""

.github/RECIPES.md says how to do the same with symbols of your own."""

import json
import random
from pathlib import Path

import numpy as np

SYMBOLS = [column + row for column in "abcdefgh" for row in "12345678"]  # replace them by yours
EOT = 256 + len(SYMBOLS)  # begins each document. Numbers below 256 are the bytes
JUMPS = [(i, j) for i in (-2, -1, 1, 2) for j in (-2, -1, 1, 2) if abs(i) != abs(j)]


def play(n_jumps: int) -> list[int]:
    """Return a game: its mark, then the squares on which the knight stands, as tokens."""
    tokens = [EOT]
    x, y = random.randrange(8), random.randrange(8)
    for _ in range(n_jumps):
        tokens.append(256 + 8 * x + y)  # the place of its name in SYMBOLS
        targets = [(x + i, y + j) for i, j in JUMPS]
        x, y = random.choice([(x, y) for x, y in targets if 0 <= x < 8 and 0 <= y < 8])
    return tokens


def main(games=8000) -> None:
    """Write the folder knight: nine tenths of the games to train, and the others to validate."""
    random.seed(0)  # the same games each time
    Path("knight").mkdir(exist_ok=True)
    for split, n in (("train", games * 9 // 10), ("val", games // 10)):
        tokens = [token for _ in range(n) for token in play(30)]
        np.save(f"knight/{split}_000000.npy", np.array(tokens, np.uint16))
    # The tokenizer: a name, and each symbol in hex, here with a blank before it
    names = " ".join(f" {symbol}".encode().hex() for symbol in SYMBOLS)
    meta = {"tokenizer": f"knight {names}", "vocab_size": EOT + 1}
    meta |= {"shards": {}, "progress": {"done": True}}
    Path("knight/meta.json").write_text(json.dumps(meta))


if __name__ == "__main__":
    main()
