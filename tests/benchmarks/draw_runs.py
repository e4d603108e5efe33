"""Draw the validation loss of runs against the tokens that they have read.

python tests/benchmarks/draw_runs.py                                # runs/, to .github/runs.png
python tests/benchmarks/draw_runs.py log/*/log.txt --png mine.png   # your own runs
"""

import argparse
from pathlib import Path

from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
# name of a log, without .log.txt: (label, line style, side of the label). The colors are
# Matplotlib's in this order, as in play.ipynb
STYLES = {
    "adamw": ("AdamW as in GPT-3's paper", "-", 1),
    "adamw_tuned": ("AdamW, tuned", "-", 1),
    "muon": ("Muon", "-", 1),
    "muon_500": ("Muon, half of the steps", "--", -1),
}


def read_log(path: Path) -> dict[str, dict[int, float]]:
    """Return a log.txt as {stream: {step: value}}."""
    streams = {}
    for step, stream, value in map(str.split, path.read_text().splitlines()):
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def draw(logs: list[Path], png: str) -> None:
    """Draw a curve for each log, with its name and its last value at its end."""
    figure, panel = plt.subplots(figsize=(9, 4), layout="constrained")
    for log in logs:
        name = log.name.removesuffix(".log.txt").replace("log.txt", log.parent.name)
        label, line, side = STYLES.get(name, (name, "-", 1))
        streams = read_log(log)
        tokens = [step * streams["total_batch_size"][0] / 1e6 for step in streams["val"]]
        losses = list(streams["val"].values())
        (curve,) = panel.plot(tokens, losses, line, marker="o", markevery=[-1])
        place = {"xytext": (8 * side, 0), "textcoords": "offset points", "va": "center"}
        place["ha"] = "left" if side > 0 else "right"
        text = f"{label}: {losses[-1]:.3f}"
        panel.annotate(text, (tokens[-1], losses[-1]), color=curve.get_color(), **place)
    panel.set(xlabel="tokens read, in millions", ylabel="validation loss, nats per token")
    panel.set(ylim=(3.3, 5.0))
    panel.set_xlim(0, 1.25 * panel.get_xlim()[1])  # leaves room for the names
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    logs = [HERE / f"runs/{name}.log.txt" for name in STYLES]
    parser.add_argument("logs", nargs="*", type=Path, default=logs)
    parser.add_argument("--png", default=HERE.parents[1] / ".github" / "runs.png")
    draw(**vars(parser.parse_args()))
