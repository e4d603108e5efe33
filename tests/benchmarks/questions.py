"""Questions and answers, made from the docstrings of Python's library: 3,000, and 100 held back.

    python tests/benchmarks/questions.py

writes answers.jsonl and held_out.jsonl. .github/TEXTS.md says how to teach a model to answer."""

import ast
import json
import os
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fineweb import find_docstrings


def main() -> None:
    rows = {}  # by answer: functions with the same docstring count once
    library = Path(os.__file__).parent
    for path in sorted(library.rglob("*.py")):
        module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        if re.search(r"\b(tests?|idlelib|_\w+)\b|-", module):
            continue
        for docstring in find_docstrings(ast.parse(path.read_bytes()), module):
            name, text = docstring.split(": ", 1)
            sentence = re.match(r"[A-Z][^.]+\.(?=\s|$)", " ".join(text.split()))
            if sentence and name != module and name.split(".")[-1].islower() and "._" not in name:
                rows[sentence[0]] = {"question": f"What does {name} do?", "answer": sentence[0]}
    lines = [json.dumps(row) + "\n" for row in rows.values()]
    random.Random(0).shuffle(lines)
    Path("held_out.jsonl").write_text("".join(lines[:100]))
    Path("answers.jsonl").write_text("".join(lines[100:]))


if __name__ == "__main__":
    main()
