"""Draw the validation loss of runs against the minutes that their steps have taken.

python tests/benchmarks/draw_runs.py                                # runs/, to .github/runs.png
python tests/benchmarks/draw_runs.py log/*/log.txt --png mine.png   # your own runs
"""

import argparse
from itertools import accumulate
from pathlib import Path

from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
# name of a log, without .log.txt: its label. The colors are Matplotlib's, as in play.ipynb
LABELS = {
    "adamw": "AdamW, GPT-3's settings, 524,288",
    "adamw_tuned": "AdamW, tuned, 524,288",
    "adamw_long": "AdamW, tuned, 131,072",
    "adamw_small": "AdamW, tuned, 65,536",
    "muon_small": "Muon, 65,536",
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
        style = {"linewidth": 3 if name == "muon_small" else 1.5, "marker": "o", "markevery": [-1]}
        (curve,) = panel.plot(minutes, losses, label=LABELS.get(name, name), **style)
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        place |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
        end = (minutes[-1], losses[-1])
        panel.annotate(f"{losses[-1]:.4f}", end, **place, color=curve.get_color())
    panel.legend(loc="upper right", frameon=False, title="optimizer, tokens a step")
    panel.set(xscale="log", xlim=(0.5, 50), ylim=(3.3, 5.5))
    ticks = [1, 2, 4, 8, 16]
    panel.set_xticks(ticks, map(str, ticks), minor=False)
    panel.set_xticks([], minor=True)
    panel.set(xlabel="minutes of one H100 (log scale)", ylabel="validation loss, nats per token")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    logs = [HERE / f"runs/{name}.log.txt" for name in LABELS]
    parser.add_argument("logs", nargs="*", type=Path, default=logs)
    parser.add_argument("--png", default=HERE.parents[1] / ".github" / "runs.png")
    draw(**vars(parser.parse_args()))
