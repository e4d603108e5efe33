"""Draw validation loss and HellaSwag of runs against the tokens that they have read.

python tests/benchmarks/draw_runs.py                                # runs/, to .github/runs.png
python tests/benchmarks/draw_runs.py log/*/log.txt --png mine.png   # your own runs
"""

import argparse
from pathlib import Path

from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
# name of a log, without .log.txt: (label, color, line style)
STYLES = {
    "adamw": ("AdamW as published, 350 steps", "tab:gray", "-"),
    "adamw_tuned": ("AdamW tuned", "tab:blue", "-"),
    "muon": ("Muon", "tab:red", "-"),
    "muon_500": ("Muon, 500 steps", "tab:red", "--"),
}


def read_log(path: Path) -> dict[str, dict[int, float]]:
    """Return a log.txt as {stream: {step: value}}."""
    streams = {}
    for step, stream, value in map(str.split, path.read_text().splitlines()):
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def draw(logs: list[Path], png: str) -> None:
    """Draw a curve for each log: validation loss on the left, HellaSwag on the right."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for log in logs:
        name = log.name.removesuffix(".log.txt").replace("log.txt", log.parent.name)
        label, color, line = STYLES.get(name, (name, None, "-"))
        streams = read_log(log)
        for panel, stream in zip(panels, ("val", "hella"), strict=True):
            values = streams.get(stream, {})
            tokens = [step * streams["total_batch_size"][0] / 1e6 for step in values]
            style = {"color": color, "linestyle": line, "marker": "o", "markevery": [-1]}
            panel.plot(tokens, values.values(), label=label, **style)
    panels[0].set(ylabel="validation loss, nats per token", ylim=(None, 7.5))
    panels[0].legend()
    panels[1].set(ylabel="HellaSwag, acc_norm", ylim=(0.22, 0.31))
    for y, text in ((0.2955, "OpenAI's GPT-2 124M, 0.2955"), (0.25, "guessing, 0.25")):
        panels[1].axhline(y, color="0.4", linestyle="--")
        place = panels[1].get_yaxis_transform()  # x from 0 to 1
        panels[1].text(0.99, y - 0.004, text, color="0.4", ha="right", transform=place)
    for panel in panels:
        panel.set_xlabel("tokens read, in millions")
        panel.grid(alpha=0.3)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    logs = [HERE / f"runs/{name}.log.txt" for name in STYLES]
    parser.add_argument("logs", nargs="*", type=Path, default=logs)
    parser.add_argument("--png", default=HERE.parents[1] / ".github" / "runs.png")
    draw(**vars(parser.parse_args()))
