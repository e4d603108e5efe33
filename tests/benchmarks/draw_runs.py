"""Draw validation losses against the tokens read, each picture for light and for dark pages.

    python tests/benchmarks/draw_runs.py log/a log/b    # your own runs: log/runs-*.png
    python tests/benchmarks/draw_runs.py                # those in runs/, for README.md

README.md's other picture is of a quickstart with many validations and samples:

    python train_gpt2.py --quickstart --log_dir log/picture --val_every 10 --sample_every 10
    python tests/benchmarks/draw_runs.py log/picture --quickstart --out .github
"""

import argparse
import math
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, MaxNLocator

HERE = Path(__file__).resolve().parent
OURS = {  # name of a log in runs/: its label, and which of a theme's colors it has
    "adamw_small": ("AdamW", 1),
    "muon_small": ("Muon", 0),
    "adamw_long": ("AdamW", 1),
    "muon_long": ("Muon", 0),
}
SAMPLES = {  # step: how the quickstart's "sample 1" begins then, and where that stands (step, loss)
    10: ("Return  el nlln ciogpre", (55, 3.72)),
    60: ("Return tolesas tinod", (110, 3.14)),
    250: ("Return the all call dent obj", (285, 2.4)),
    1250: ("Return the response used", (420, 1.05)),
}
GUESSES = {  # what losses mean: how many bytes one would choose from, and where the text stands
    257: ("like a guess among 257", 1262, "top"),
    16: ("among 16", 1262, "bottom"),
    4: ("among 4", 90, "bottom"),
}
THEMES = {  # background, text, faint text, lines, and the colors of curves
    "light": ("#ffffff", "#1f2328", "#59636e", "#b7bfc8", ["#8250df", "#77818c", "#0969da"]),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#4a525c", ["#b083f0", "#9198a1", "#4493f8"]),
}


def read_log(path: Path) -> dict[str, dict[int, float]]:
    """Return a log.txt as {stream: {step: value}}."""
    streams = {}
    for step, stream, value in map(str.split, path.read_text().splitlines()):
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def make_figure(theme: str, height: float, columns=1) -> tuple:
    """Return an empty figure of 1,200 pixels, and its axes."""
    paper, _, faint, _, _ = THEMES[theme]
    style = {"figsize": (12, height), "dpi": 100, "layout": "constrained", "facecolor": paper}
    figure, (axes,) = plt.subplots(1, columns, sharey=True, squeeze=False, **style)
    for ax in axes:
        ax.set_facecolor(paper)
        ax.tick_params(colors=faint, labelsize=23, length=0)
        for text in (ax.xaxis.label, ax.yaxis.label, ax.title):
            text.set(color=faint, fontsize=23)
        ax.spines[:].set_visible(False)
        ax.set_axisbelow(True)
    return figure, axes


def draw_quickstart(log: Path, theme: str):
    """Return a figure of what the quickstart's model learns: its loss, and what it writes."""
    paper, ink, faint, rule, (accent, *_) = THEMES[theme]
    figure, (ax,) = make_figure(theme, 6.6)
    val = read_log(log)["val"]
    for choices, (text, x, side) in GUESSES.items():
        loss = math.log(choices)
        ax.axhline(loss, color=rule, linestyle=(0, (1, 1.5)), linewidth=3, zorder=0)
        where = {"xytext": (0, 4 if side == "bottom" else -6), "textcoords": "offset points"}
        style = {"color": faint, "fontsize": 23, "ha": "right" if x > 1000 else "left", "va": side}
        ax.annotate(f"{text}: {loss:.2f}", (x, loss), **where, **style)
    ax.plot(list(val), list(val.values()), color=accent, linewidth=7, zorder=2)
    for step, (text, place) in SAMPLES.items():
        ax.plot(step, val[step], "o", color=accent, ms=17, mec=paper, mew=3, zorder=3)
        style = {"fontsize": 24, "va": "center"}
        when = ax.text(*place, f"step {step:,}", color=accent, weight="bold", **style)
        style |= {"family": "DejaVu Sans Mono", "textcoords": "offset points", "color": ink}
        ax.annotate(text, (1, 0.5), (14, 0), xycoords=when, **style)
    ax.text(55, 4.55, "From noise to words", color=ink, size=32, weight="bold")
    ax.set(xlabel="steps of training", ylabel="loss: surprise per byte")
    ax.set(xlim=(-15, 1275), ylim=(0.7, 5.65), xticks=range(0, 1251, 250), yticks=range(1, 6))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def draw_runs(logs: list[Path], is_ours: bool, theme: str):
    """Return a figure with a panel for each number of tokens, and in it a curve for each log."""
    paper, _, _, rule, colors = THEMES[theme]
    panels = {}  # {tokens: [(label, color, tokens read, losses)]}
    for i, log in enumerate(logs):
        name = log.name.removesuffix(".log.txt").replace("log.txt", log.parent.name)
        label, color = OURS[name] if is_ours else (name, i)
        color = [*colors, *plt.cm.Set2.colors][color % 11]
        streams = read_log(log)
        read = [step * streams["total_batch_size"][0] for step in streams["val"]]
        panels.setdefault(read[-1], []).append((label, color, read, list(streams["val"].values())))
    last = [losses[-1] for curves in panels.values() for *_, losses in curves]
    bottom = min(last) - 0.13
    top = max(last) + 0.5  # where the curves enter the picture
    figure, axes = make_figure(theme, 5.4, len(panels))
    for ax, (end, curves) in zip(axes, sorted(panels.items()), strict=True):
        free = top  # two labels stand at least a line apart
        for label, color, read, losses in sorted(curves, key=lambda curve: -curve[3][-1]):
            ax.plot(read, losses, color=color, linewidth=5)
            ax.plot(end, losses[-1], "o", color=color, ms=14, mec=paper, mew=2.5, zorder=3)
            free = min(losses[-1], free - 0.09 * (top - bottom))
            style = {"fontsize": 23, "va": "center", "color": color, "weight": "bold"}
            style["bbox"] = {"facecolor": paper, "edgecolor": "none", "pad": 1}
            where = {"xytext": (14, 0), "textcoords": "offset points"}
            ax.annotate(f"{losses[-1]:.3f} {label}", (end, free), **where, **style)
        ax.set(xlim=(0, 1.95 * end), ylim=(bottom, top), xticks=[0, end], xlabel="tokens read")
        ax.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.grid(axis="y", color=rule, linewidth=1)
    axes[0].set_ylabel("loss (lower is better)")
    return figure


def main():
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **style)
    ours = [HERE / f"runs/{name}.log.txt" for name in OURS]
    parser.add_argument("logs", nargs="*", type=Path, default=ours)
    parser.add_argument("--quickstart", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    is_ours = args.logs == ours
    out = args.out or (HERE.parents[1] / ".github" if is_ours else Path("log"))
    out.mkdir(exist_ok=True)
    logs = [log / "log.txt" if log.is_dir() else log for log in args.logs]
    for theme in THEMES:
        if args.quickstart:
            figure = draw_quickstart(logs[0], theme)
        else:
            figure = draw_runs(logs, is_ours, theme)
        figure.savefig(out / f"{'quickstart' if args.quickstart else 'runs'}-{theme}.png")


if __name__ == "__main__":
    main()
