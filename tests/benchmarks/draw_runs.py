"""Draw the validation loss of runs against the minutes that their steps have taken.

python tests/benchmarks/draw_runs.py                                # runs/, to .github/runs.png
python tests/benchmarks/draw_runs.py log/*/log.txt --png mine.png   # your own runs
"""

import argparse
from itertools import accumulate
from pathlib import Path

from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
# name of a log, without .log.txt: its label, color and line style
STYLES = {
    "adamw": ("AdamW as in GPT-3, batches of 524,288", "tab:gray", ":"),
    "adamw_tuned": ("AdamW, batches of 524,288", "tab:gray", "--"),
    "adamw_long": ("AdamW, batches of 131,072", "tab:gray", "-"),
    "adamw_small": ("AdamW", "tab:gray", "-"),
    "muon_long": ("Muon, batches of 131,072", "tab:purple", "-"),
    "muon_small": ("Muon", "tab:purple", "-"),
}


def read_log(path: Path) -> dict[str, dict[int, float]]:
    """Return a log.txt as {stream: {step: value}}."""
    streams = {}
    for step, stream, value in map(str.split, path.read_text().splitlines()):
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def draw(logs: list[Path], png: str) -> None:
    """Draw a panel for each number of tokens, and in it a curve for each log."""
    panels = {}  # {million tokens: [(name, streams)]}
    for log in logs:
        name = log.name.removesuffix(".log.txt").replace("log.txt", log.parent.name)
        streams = read_log(log)
        tokens = streams["total_batch_size"][0] * len(streams["dt"]) / 1e6
        panels.setdefault(f"{tokens:.3g}", []).append((name, streams))
    style = {"sharey": True, "squeeze": False, "layout": "constrained", "figsize": (9, 3.6)}
    figure, (axes,) = plt.subplots(1, len(panels), **style)
    is_ours = STYLES.keys() >= {name for runs in panels.values() for name, _ in runs}
    for axis, tokens in zip(axes, sorted(panels, key=float), strict=True):
        runs = panels[tokens]
        for name, streams in runs:
            draw_run(axis, name, streams)
        batches = {int(streams["total_batch_size"][0]) for _, streams in runs}
        same = f", batches of {min(batches):,}" if len(batches) == 1 else ""
        axis.set_title(f"{tokens}M tokens{same}", fontsize=10, loc="left")
        axis.set(xlabel="minutes on one H100" if is_ours else "minutes", xlim=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    if is_ours:
        axes[0].set(ylim=(3.2, 5.2), yticks=[3.5, 4, 4.5, 5])
    axes[0].set_ylabel("validation loss, nats per token")
    figure.savefig(png, dpi=110)


def draw_run(axis, name: str, streams: dict) -> None:
    """Draw the losses of a run, with the last one and the run's label at the end."""
    spent = [0, *accumulate(streams["dt"].values())]  # milliseconds before each step
    streams["val"].pop(0, None)  # a loss of 11, from which the curve would be a straight line
    minutes = [spent[step] / 60_000 for step in streams["val"]]
    losses = list(streams["val"].values())
    label, color, line = STYLES.get(name, (name, None, "-"))
    marker = "o" if len(losses) < 5 else ""  # each validation, where they are few
    (curve,) = axis.plot(minutes, losses, line, color=color, linewidth=2, marker=marker)
    axis.plot(minutes[-1], losses[-1], "o", color=curve.get_color())
    place = {"xytext": (8, -4), "textcoords": "offset points", "fontsize": 9}
    text = f"{losses[-1]:.2f}  {label}"
    axis.annotate(text, (minutes[-1], losses[-1]), color=curve.get_color(), **place)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    logs = [HERE / f"runs/{name}.log.txt" for name in STYLES]
    parser.add_argument("logs", nargs="*", type=Path, default=logs)
    parser.add_argument("--png", default=HERE.parents[1] / ".github" / "runs.png")
    draw(**vars(parser.parse_args()))
