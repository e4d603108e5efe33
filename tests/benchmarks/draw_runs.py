"""Draw the validation loss of runs against the minutes that their steps have taken.

python tests/benchmarks/draw_runs.py                                # runs/, to .github/runs.png
python tests/benchmarks/draw_runs.py log/*/log.txt --png mine.png   # your own runs
"""

import argparse
from itertools import accumulate
from pathlib import Path

from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
# name of a log, without .log.txt: its label, with the tokens of a batch. adamw_small is too short for
# a curve of its own: it is a row of the table below the picture
LABELS = {
    "adamw": "AdamW, GPT-3's settings, batches of 524,288",
    "adamw_tuned": "AdamW, tuned, batches of 524,288",
    "adamw_long": "AdamW, tuned, batches of 131,072",
    "muon_long": "Muon, batches of 131,072",
    "muon_small": "Muon, batches of 65,536",
}


def read_log(path: Path) -> dict[str, dict[int, float]]:
    """Return a log.txt as {stream: {step: value}}."""
    streams = {}
    for step, stream, value in map(str.split, path.read_text().splitlines()):
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def draw(logs: list[Path], png: str) -> None:
    """Draw a curve for each log, with its last value at its end."""
    figure, panel = plt.subplots(figsize=(9, 4), layout="constrained")
    for log in logs:
        name = log.name.removesuffix(".log.txt").replace("log.txt", log.parent.name)
        streams = read_log(log)
        spent = [0, *accumulate(streams["dt"].values())]  # milliseconds before each step
        streams["val"].pop(0, None)  # a log axis has no 0
        minutes = [spent[step] / 60_000 for step in streams["val"]]
        losses = list(streams["val"].values())
        bold = name == "muon_small"
        (curve,) = panel.plot(
            minutes, losses, linewidth=3 if bold else 1.5, marker="o", markevery=[-1]
        )
        text = f"{losses[-1]:.2f}  {LABELS.get(name, name)}"
        style = {"color": curve.get_color(), "weight": "bold" if bold else "normal"}
        place = {"xytext": (8, -4), "textcoords": "offset points"}
        if bold:  # other curves are at its right
            place |= {"xytext": (4, -20), "ha": "right"}
        panel.annotate(text, (minutes[-1], losses[-1]), **place, **style)
    panel.set(xscale="log", xlim=(0.5, 18), ylim=(3.2, 5.2))
    ticks = [0.5, 1, 2, 4, 8, 16]
    panel.set_xticks(ticks, map(str, ticks), minor=False)
    panel.set_xticks([], minor=True)
    panel.set_yticks([3.5, 4, 4.5, 5])
    panel.set_xlabel("minutes of one H100 (log scale)")
    panel.set_ylabel("validation loss, nats per token")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    logs = [HERE / f"runs/{name}.log.txt" for name in LABELS]
    parser.add_argument("logs", nargs="*", type=Path, default=logs)
    parser.add_argument("--png", default=HERE.parents[1] / ".github" / "runs.png")
    draw(**vars(parser.parse_args()))
