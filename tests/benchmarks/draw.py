"""Draw the pictures of the pages, each for light and for dark backgrounds.

`python tests/benchmarks/draw.py ideas` takes its data from results/, runs and quickstart from runs/.
quickstart.log.txt is that of `train_gpt2.py --quickstart --val_every 40 --num_samples 6`.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

from ideas import GPT2, IDEAS
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter
from measure import read_log

HERE = Path(__file__).resolve().parent
THEMES = {  # background, text, faint text, lines, and the colors of curves
    "light": ("#ffffff", "#1f2328", "#59636e", "#b7bfc8", ["#8250df", "#77818c"]),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#4a525c", ["#b083f0", "#9198a1"]),
}


def make_figure(theme: str, height: float, columns=1) -> tuple:
    """Return an empty figure of 1,200 pixels, and its axes."""
    paper, _, faint, _, _ = THEMES[theme]
    size = {"figsize": (12, height), "dpi": 100, "layout": "constrained"}
    figure, (axes,) = plt.subplots(1, columns, sharey=True, squeeze=False, facecolor=paper, **size)
    for ax in axes:
        ax.set_facecolor(paper)
        ax.tick_params(colors=faint, labelsize=23, length=0)
        for text in (ax.xaxis.label, ax.yaxis.label, ax.title):
            text.set(color=faint, fontsize=23)
        ax.spines[:].set_visible(False)
    return figure, axes


def write(ax, x: float, y: float, text: str, color: str, **style):
    """Write a text into a picture, and return it."""
    style = {"fontsize": 23, "va": "center"} | style
    return ax.text(x, y, text, color=color, **style)


# ---- the ideas ----------------------------------------------------------------------------------

SEEDS = (1337, 2)
LAPTOP = "--quickstart --max_steps 1250"
# The names of these stand on the left of their crosses
LEFT = "untied head, RMSNorm without gains, no biases, soft cap on the logits, gated attention"


def compare_ideas(flags: str) -> tuple[dict, float]:
    """Return {idea: its mean difference to GPT-2 with the same seed}, and the standard deviation of
    such a mean by chance, from how much all differences change from one seed to the other."""
    losses = {}  # {(idea, source, machine): {seed: loss}}: the last row counts
    for line in (HERE / "results/ideas.jsonl").read_text().splitlines():
        row = json.loads(line)
        case = row["case"]
        if case["flags"] == flags and row["unit"] == "nats per token":
            key = (case["idea"], case["source"], row["machine"])
            losses.setdefault(key, {})[case["seed"]] = row["value"]
    pairs = {key: each for key, each in losses.items() if set(SEEDS) <= each.keys()}
    first, second = SEEDS
    changes = [each[second] - each[first] for each in pairs.values()]
    means = {}
    for (name, _, machine), each in pairs.items():
        base = pairs[GPT2.name, GPT2.source, machine]
        means[name] = statistics.mean(each[seed] - base[seed] for seed in SEEDS)
    return means, statistics.stdev(changes) / 2**0.5


def draw_ideas(theme: str):
    """Return a figure with a cross for each idea, whose arms are two standard deviations."""
    _, ink, faint, rule, (accent, _) = THEMES[theme]
    laptop, laptop_chance = compare_ideas(LAPTOP)
    gpu, gpu_chance = compare_ideas("")
    figure, (ax,) = make_figure(theme, 8)
    ax.axhline(0, color=rule, linewidth=2)
    ax.axvline(0, color=rule, linewidth=2)
    for idea in IDEAS:
        name = idea.name
        x, y = laptop[name], gpu[name]
        ax.errorbar(x, y, 2 * gpu_chance, 2 * laptop_chance, "o", ms=9, color=accent, elinewidth=2)
        ha = "right" if name in LEFT else "left"
        x += (2 * laptop_chance + 0.001) * (-1 if name in LEFT else 1)
        write(ax, x, y, name, ink, ha=ha, fontsize=19)
    write(ax, -0.064, -0.078, "helps both", faint)
    write(ax, -0.064, 0.032, "helps only the laptop", faint)
    write(ax, 0.089, -0.078, "helps only GPT-2", faint, ha="right")
    write(ax, 0.089, 0.032, "helps neither", faint, ha="right")
    ax.set_xlabel("change of the loss of a laptop's small GPT")
    ax.set_ylabel("change for GPT-2 124M, on a GPU")
    ax.set(xlim=(-0.066, 0.091), ylim=(-0.082, 0.036))
    ax.set(xticks=(-0.04, 0, 0.04, 0.08), yticks=(-0.06, -0.04, -0.02, 0, 0.02))
    return figure


# ---- runs ---------------------------------------------------------------------------------------

# A panel each, for 131M tokens and for 524M: the logs of Muon and of AdamW
RUNS = (("muon_small", "adamw_best"), ("muon_long", "adamw_long"))


def draw_runs(theme: str):
    """Return a figure with a panel for 131M tokens and one for 524M, each with two curves."""
    paper, _, _, rule, colors = THEMES[theme]
    figure, axes = make_figure(theme, 5.4, columns=2)
    for ax, names in zip(axes, RUNS, strict=True):
        for label, name, color in zip(("Muon", "AdamW"), names, colors, strict=True):
            log = read_log(HERE / f"runs/{name}.log.txt")
            tokens = log["total_batch_size"][0]
            read = [step * tokens for step in log["val"]]
            losses = list(log["val"].values())
            ax.plot(read, losses, color=color, linewidth=5)
            end = losses[-1]
            ax.plot(read[-1], end, "o", color=color, ms=14, mec=paper, mew=2.5, zorder=3)
            write(ax, 1.07 * read[-1], end, f"{end:.3f} {label}", color, weight="bold")
        ax.set(xlim=(0, 2.25 * read[-1]), xticks=(0, read[-1]), xlabel="tokens read")
        ax.set(ylim=(3.17, 4.33), yticks=(3.5, 4))
        ax.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
        ax.grid(axis="y", color=rule, linewidth=1)
    axes[0].set_ylabel("loss (lower is better)")
    return figure


# ---- the quickstart -----------------------------------------------------------------------------

SAMPLES = {  # step: what the quickstart writes then, and where that stands (step, loss)
    0: ("Return run run figML", (28, 7.4)),
    40: ("Return a the last the t", (62, 6.35)),
    80: ("Return is a type of of the", (104, 5.55)),
    200: ("Return the result is", (226, 4.85)),
    800: ("Return True if it was False.", (318, 3.3)),
}
GUESSES = {  # what losses mean: how many tokens one would choose from, and where the text stands
    2048: ("like a guess among 2,048", 792, 0.17),
    300: ("among 300", 792, 0.17),
    40: ("among 40", 225, 0.17),
}


def draw_quickstart(theme: str):
    """Return a figure of what the quickstart's model learns: its loss, and what it writes."""
    paper, ink, faint, rule, (accent, _) = THEMES[theme]
    figure, (ax,) = make_figure(theme, 6.6)
    val = read_log(HERE / "runs/quickstart.log.txt")["val"]
    for choices, (text, x, shift) in GUESSES.items():
        loss = math.log(choices)
        ax.axhline(loss, color=rule, linestyle=(0, (1, 1.5)), linewidth=3, zorder=0)
        write(ax, x, loss + shift, f"{text}: {loss:.2f}", faint, ha="right")
    ax.plot(list(val), list(val.values()), color=accent, linewidth=7, zorder=2)
    for step, (text, place) in SAMPLES.items():
        ax.plot(step, val[step], "o", color=accent, ms=17, mec=paper, mew=3, zorder=3)
        when = write(ax, *place, f"step {step:,}", accent, weight="bold")
        sample = ax.annotate(text, (1, 0.5), (14, 0), xycoords=when, textcoords="offset points")
        sample.set(color=ink, fontsize=23, va="center", family="DejaVu Sans Mono")
    write(ax, 225, 6.88, "From noise to words", ink, weight="bold", fontsize=32)
    ax.set(xlabel="steps of training", ylabel="loss: surprise per token")
    ax.set(xlim=(-10, 822), ylim=(3.05, 7.9), xticks=range(0, 801, 200), yticks=range(4, 8))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pictures = {"ideas": draw_ideas, "runs": draw_runs, "quickstart": draw_quickstart}
    parser.add_argument("picture", choices=pictures)
    name = parser.parse_args().picture
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name})
    for theme in THEMES:
        figure = pictures[name](theme)
        if name == "ideas":
            figure.savefig(HERE / f"{name}-{theme}.svg", metadata={"Date": None})
        else:
            figure.savefig(HERE.parents[1] / f".github/{name}-{theme}.png")


if __name__ == "__main__":
    main()
