"""Make every table of README.md and of the README.md in this folder from the rows in results/.

    python tests/benchmarks/tables.py             write the tables between their marks
    python tests/benchmarks/tables.py --check     say which differ, and how old their rows are

A table stands between <!-- table: NAME --> and <!-- end -->. It shows the rows of the newest commit
and machine that has any for its case. These rows are taken for turns of one measurement.
"""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # a test imports this file as a module
from ideas import ENTRIES, GPT2, IDEAS, count_changes  # noqa: E402, F401
from mechanisms import ROWS, SCRIPT, change, count_lines  # noqa: E402, F401

ROOT = HERE.parents[1]
PAGES = [ROOT / "README.md", HERE / "README.md", HERE / "runs" / "README.md"]


# ---- rows ---------------------------------------------------------------------------------------


def load(name: str, **wanted) -> list[dict]:
    """Return the rows of results/NAME.jsonl whose cases have the wanted settings."""
    rows = [json.loads(line) for line in (HERE / f"results/{name}.jsonl").read_text().splitlines()]
    return [row for row in rows if wanted.items() <= (row["case"] | {"unit": row["unit"]}).items()]


def of_last_machine(rows: list[dict]) -> list[dict]:
    """Return the rows of the machine of the last one, of all commits."""
    return [row for row in rows if row["machine"] == rows[-1]["machine"]]


def by_machine(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of each machine, in the order in which the machines appear first."""
    machines = dict.fromkeys(row["machine"] for row in rows)
    return [[row for row in rows if row["machine"] == machine] for machine in machines]


def newest(rows: list[dict]) -> list[dict]:
    """Return the rows of the commit and machine of the last one."""
    last = (rows[-1]["commit"], rows[-1]["machine"]) if rows else None
    return [row for row in rows if (row["commit"], row["machine"]) == last]


def values(name: str, **wanted) -> list:
    """Return the values of the newest rows with these settings."""
    return [row["value"] for row in newest(load(name, **wanted))]


def median(numbers: list, form: str, factor=1.0) -> str:
    """Return the median as a text, with the least and the largest if they differ; "-" for none."""
    texts = [
        form.format(factor * number) for number in (*sorted(numbers)[:1], *sorted(numbers)[-1:])
    ]
    if not numbers:
        return "-"
    middle = form.format(factor * statistics.median(numbers))
    return middle if texts[0] == texts[1] else f"{middle} ({texts[0]} to {texts[1]})"


def source(rows: list[dict]) -> str:
    """Return where rows come from, for the last column of a table."""
    row = rows[-1]
    machine = re.sub("^1 x |NVIDIA | 80GB HBM3", "", row["machine"])
    return f"{row['date']}, {machine}, torch {row['torch'].partition('+')[0]}, {row['commit']}"


def unique(rows: list[dict], *settings) -> list[dict]:
    """Return the cases that differ in these settings, in the order in which they appear first."""
    found = {}
    for row in rows:
        case = {setting: row["case"].get(setting) for setting in settings}
        found[json.dumps(case)] = case
    return list(found.values())


# ---- tables: each function returns lists of cells, the heading first ------------------------------


def speed_row(rows: list[dict], case: dict) -> list:
    """Return tokens a second, ms a step, GiB and the source of the newest rows of a case."""
    rows = newest([row for row in rows if case.items() <= row["case"].items()])
    ms = [row["value"] for row in rows if row["unit"] == "ms"]
    peak = [row["value"] for row in rows if row["unit"] == "GiB"]
    speed = median([1000 * case["tokens"] / value for value in ms], "{:,.0f}")
    return [speed, median(ms, "{:.1f}"), median(peak, "{:.1f}"), source(rows)]


def table_speed() -> list:
    """train_gpt2.py on one GPU, of each kind."""
    heading = ["model", "flags", "B", "tokens a step", "tokens a second", "ms a step"]
    table = [[*heading, "GiB", "measured"]]
    for rows in by_machine(load("speed", script="train_gpt2.py")):
        cases = unique(rows, "model", "B", "tokens", "script", "flags")
        for case in sorted(cases, key=lambda case: (case["flags"], case["model"], case["tokens"])):
            row = speed_row(rows, case)
            flags = f"`{case['flags']}`" if case["flags"] else ""
            table.append([case["model"], flags, case["B"], f"{case['tokens']:,}", *row])
    return table


def table_peers() -> list:
    """GPT-2 124M in steps of 524,288 tokens, B 64, beside other programs."""
    case = {"model": "d12", "B": 64, "tokens": 2**19, "flags": ""}
    scripts = unique(load("peers"), "script")
    found = [(each["script"], speed_row(load("peers"), case | each)) for each in scripts]
    found = [(f"`{name}`" if name.endswith(".py") else name, row) for name, row in found]
    found.sort(key=lambda row: -int(row[1][0].split()[0].replace(",", "")))
    machines = {row[3].split(", ")[1] for _, row in found}
    assert len(machines) == 1, f"programs on different machines do not compare: {machines}"
    heading = f"GPT-2 124M on one {machines.pop()}, 64 sequences at a time, 524,288 tokens a step"
    table = [[heading, "tokens a second"]]
    return table + [[name, row[0]] for name, row in found]


def table_start() -> list:
    """Seconds until the first update is done, on each kind of GPU."""
    parts = ["imports", "setup and state", "validation", "step", "all"]
    table = [["caches of compiled kernels", "first save", *parts, "measured"]]
    for rows in by_machine(load("start", script="train_gpt2.py")):
        cases = unique(rows, "cache", "flags")
        for case in sorted(cases, key=lambda case: (case["flags"], case["cache"] == "empty")):
            own = newest([row for row in rows if case.items() <= row["case"].items()])
            cells = []
            for part in parts:
                seconds = [row["value"] for row in own if row["case"]["part"] == part]
                cells.append(median(seconds, "{:.1f}"))
            saves = "yes" if "--save_every" in case["flags"] else "no"
            table.append([case["cache"], saves, *cells, source(own)])
    return table


def table_memory() -> list:
    """The largest B that fits, without --recompute, and in brackets with it."""
    rows = load("memory", unit="sequences")
    limits = [case["GiB"] for case in unique(rows, "GiB")]
    table = [["model", *(f"{limit} GiB" for limit in limits)]]
    for case in unique(rows, "model"):
        cells = [case["model"]]
        for limit in limits:
            case |= {"GiB": limit, "unit": "sequences"}
            found = [values("memory", **case, recompute=r, B="largest") for r in (False, True)]
            cells.append("{} ({})".format(*(max(sizes, default=0) or "-" for sizes in found)))
        table.append(cells)
    return table


def table_price() -> list:
    """What is lost without each mechanism."""
    table = [
        ["without", "its lines", "change in ms a step", "in tokens a second", "in GiB", "in loss"]
    ]
    for mechanism in ROWS:
        ms = values("price", without=mechanism.name, unit="ms")  # [with, without] each
        peak = values("price", without=mechanism.name, unit="GiB")
        nats = values("price", without=mechanism.name, unit="nats per byte")
        label = re.sub(r"(.*) instead of (.*)", r"\1 (\2 in its place)", mechanism.name)
        cells = [label, str(count_lines(mechanism.spans) or "")]
        cells.append(spread([b - a for a, b in ms], "{:+.1f}"))
        cells.append(spread([100 * (a / b - 1) for a, b in ms], "{:+.0f}%"))
        cells.append(spread([b - a for a, b in peak], "{:+.1f}"))
        cells.append(spread([b - a for a, b in nats], "{:+.3f}"))
        table.append(cells)
    timed, learned = (source(load("price", unit=unit)) for unit in ("ms", "nats per byte"))
    return [*table, ["measured", "", timed, "", "", learned]]


def spread(numbers: list, form: str) -> str:
    """Return the least and the largest number as a text, "" for none."""
    texts = [form.format(number) for number in sorted(numbers)]
    return " to ".join(dict.fromkeys([*texts[:1], *texts[-1:]]))


def table_scaling() -> list:
    """Several GPUs beside one of the same machine."""
    table = [
        [
            "GPUs",
            "flags",
            "tokens a step",
            "ms a step",
            "tokens a second",
            "share of as many single GPUs",
            "measured",
        ]
    ]
    for rows in by_machine(load("scaling", unit="ms")):

        def measured(case, rows=rows) -> list[dict]:
            return newest([row for row in rows if case.items() <= row["case"].items()])

        one = [row["value"] for row in measured({"GPUs": 1, "tokens": 2**19, "flags": ""})]
        for case in sorted(unique(rows, "GPUs", "tokens", "flags"), key=lambda case: case["GPUs"]):
            ms = [row["value"] for row in measured(case)]
            linear = statistics.median(one) * case["tokens"] / 2**19 / case["GPUs"]
            flags = f"`{case['flags']}`" if case["flags"] else ""
            cells = [case["GPUs"], flags, f"{case['tokens']:,}", median(ms, "{:.1f}")]
            cells.append(f"{1000 * case['tokens'] / statistics.median(ms):,.0f}")
            share = f"{100 * linear / statistics.median(ms):.0f}%"
            table.append([*cells, share, source(measured(case))])
    return table


def table_tokenize() -> list:
    """fineweb.py beside tiktoken alone."""
    table = [["cores", "from", "tokens a second", "of tiktoken alone", "GiB", "measured"]]
    rows = load("tokenize", unit="tokens/s", script="fineweb.py")
    for case in unique(rows, "workers", "source"):
        workers = {"workers": case["workers"], "unit": "tokens/s"}
        alone = statistics.median(values("tokenize", script="tiktoken", **workers))
        speeds = values("tokenize", script="fineweb.py", source=case["source"], **workers)
        peak = values("tokenize", unit="GiB", script="fineweb.py", **case)
        cells = [case["workers"], case["source"], median(speeds, "{:.1f} million", 1e-6)]
        cells += [f"{statistics.median(speeds) / alone:.2f}", median(peak, "{:.1f}")]
        table.append([*cells, source(newest(load("tokenize", **case)))])
    return table


def table_quickstart() -> list:
    """Five starts."""
    rows = load("quickstart")
    cells = [median(values("quickstart", unit="s"), "{:.0f}"), len(values("quickstart", unit="s"))]
    loss = median(values("quickstart", unit="nats per byte"), "{:.4f}")
    return [
        ["seconds", "starts", "validation loss, nats per byte", "measured"],
        [*cells, loss, source(rows)],
    ]


def table_threads() -> list:
    """A step of the quickstart with each number of threads, and with PyTorch's own choice."""
    rows = newest(load("threads"))
    names = [row["case"]["threads"] for row in rows]
    table = [["threads", *(name if name != "own" else "PyTorch's choice" for name in names)]]
    table[0].append("measured")
    return [*table, ["ms a step", *(f"{row['value']:.1f}" for row in rows), source(rows)]]


def table_runs() -> list:
    """Finished runs of GPT-2 124M."""
    heading = ["run", "steps", "tokens a step", "tokens", "minutes of steps", "ms a step"]
    table = [[*heading, "validation loss", "HellaSwag, acc_norm", "measured"]]
    for case in unique(load("runs"), "run", "steps", "batch"):
        tokens = case["steps"] * case["batch"] / 1e6
        cells = [case["run"], f"{case['steps']:,}", f"{case['batch']:,}", f"{tokens:.0f}M"]
        cells.append(median(values("runs", unit="minutes", **case), "{:.1f}"))
        cells.append(median(values("runs", unit="ms", **case), "{:.0f}"))
        cells.append(f"{values('runs', unit='nats per token', **case)[-1]:.4f}")
        hella = values("runs", unit="acc_norm", **case)
        error = [f"{p:.4f} ± {(p * (1 - p) / 10042) ** 0.5:.4f}" for p in hella]
        cells.append(error[-1] if error else "-")
        table.append([*cells, source(load("runs", **case))])
    return table


def table_recipes() -> list:
    """The README's rows: those of table_runs that have a name here."""
    names = {
        "muon_small": "Muon",
        "adamw_small": "AdamW",
        "muon_long": "Muon",
        "adamw_long": "AdamW",
    }
    table = [["GPT-2 124M", "tokens", "validation loss"]]
    for run, name in names.items():
        row = newest(load("runs", run=run, unit="nats per token"))[-1]
        tokens = f"{row['case']['steps'] * row['case']['batch'] / 1e6:.0f}M"
        loss = f"{row['value']:.3f}"
        loss = f"**{loss}**" if name == "Muon" else loss
        table.append([name, tokens, loss])
    return table


LAPTOP = "--quickstart --max_steps 1250"
SEEDS = (1337, 2)


def table_ideas_quickstart() -> list:
    """The same for the quickstart's model."""
    return table_ideas(LAPTOP)


def table_ideas(flags="") -> list:
    """Changes to GPT-2, and their losses less that of GPT-2 with the same seed: the mean over seeds,
    and its standard deviation."""
    heading = ["idea", "lines changed, places", "parameters", "ms a step", "seeds"]
    table = [[*heading, "validation loss", "difference to GPT-2 in nats"]]
    if not (HERE / "results/ideas.jsonl").exists():
        return table
    losses = load("ideas", unit="nats per token", flags=flags)
    # Commits may differ, as long as the script trains the same: of a seed, the last row counts
    found = {}  # {name: losses of the idea, one for each seed}
    for idea in [GPT2, *ENTRIES]:  # other ideas combined have another source
        case = {"idea": idea.name, "source": idea.source, "flags": flags}
        if rows := of_last_machine(load("ideas", unit="nats per token", **case)):
            last = {row["case"]["seed"]: row for row in rows}
            found[idea.name] = [last[seed] for seed in SEEDS if seed in last]
    differences = {name: compare(rows, losses) for name, rows in found.items() if name != GPT2.name}
    steps = seed_steps(flags)
    for name, rows in found.items():
        case = {key: rows[-1]["case"][key] for key in ("idea", "source", "flags")}
        cells = [name, "{lines}, {places}".format(**rows[-1]["case"])]
        cells.append(median(values("ideas", unit="parameters", **case), "{:,.0f}"))
        times = of_last_machine(load("ideas", unit="ms", **case))
        times = {row["case"]["seed"]: row["value"] for row in times}
        cells.append(median([times[seed] for seed in SEEDS if seed in times], "{:.1f}"))
        cells += [len(rows), f"{statistics.mean(row['value'] for row in rows):.4f}"]
        text = ""
        if each := differences.get(name):
            text = f"{statistics.mean(each):+.4f}"
            if len(steps) > 1:
                text += f" ± {statistics.stdev(steps) / len(each) ** 0.5:.4f}"
        table.append([*cells, text])
    where = source(sorted(losses, key=lambda row: row["date"])).rpartition(", ")[0]
    commits = dict.fromkeys(row["commit"] for rows in found.values() for row in rows)
    return [*table, ["measured", *[""] * 5, f"{where}, {', '.join(commits)}"]] if found else table


def seed_steps(flags: str) -> list[float]:
    """Return how much the loss of each idea, and of GPT-2, changes from seed 1337 to seed 2."""
    losses = {}  # {(idea, source, machine): {seed: loss}}
    for row in load("ideas", unit="nats per token", flags=flags):
        key = (row["case"]["idea"], row["case"]["source"], row["machine"])
        losses.setdefault(key, {})[row["case"]["seed"]] = row["value"]
    old, new = SEEDS
    return [each[new] - each[old] for each in losses.values() if {old, new} <= each.keys()]


def table_chance() -> list:
    """The standard deviation, by chance alone, of the difference between the losses of two runs with
    two seeds, and with the same seed, from how an idea's loss changes with its seed. And 2.5 times
    the latter, for one pair of runs and for the mean of three."""
    heading = ["model", "pairs of runs", "σ, two seeds", "σ, the same seed"]
    table = [[*heading, "one seed tells apart", "three seeds tell apart"]]
    models = {"GPT-2 124M, 131M tokens": "", "the quickstart's, 1M bytes": LAPTOP}
    for model, flags in models.items():
        # What a seed does to all of them cancels out if runs with the same seed are compared
        steps = seed_steps(flags)
        unpaired = statistics.mean(step**2 for step in steps) ** 0.5
        paired = statistics.stdev(steps)
        numbers = [unpaired, paired, 2.5 * paired, 2.5 * paired / 3**0.5]
        table.append([model, len(steps), *(f"{number:.4f}" for number in numbers)])
    return table


def compare(rows: list[dict], losses: list[dict]) -> list[float]:
    """Return each loss less the mean of those of GPT-2 with the same seed, on the same machine."""
    differences = []
    for row in rows:
        case = {"idea": GPT2.name, "seed": row["case"]["seed"]}
        bases = []
        for base in losses:
            if base["machine"] == row["machine"] and case.items() <= base["case"].items():
                bases.append(base["value"])
        assert bases, f"no row of {case} on {row['machine']}"
        differences.append(row["value"] - statistics.mean(bases))
    return differences


# ---- pages --------------------------------------------------------------------------------------


def markdown(table: list) -> str:
    """Return a table as Markdown."""
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def fill(page: str) -> str:
    """Return a page with its tables made again."""

    def make(found) -> str:
        table = globals()[f"table_{found[2]}"]()
        return f"{found[1]}\n{markdown(table)}\n<!-- end -->"

    return re.sub(r"(?s)(<!-- table: (\w+) -->)\n.*?<!-- end -->", make, page)


def ages() -> list[str]:
    """Return for each file of rows how many commits ago the script of its newest rows was changed."""
    lines = []
    for path in sorted((HERE / "results").glob("*.jsonl")):
        script = "fineweb.py" if path.stem == "tokenize" else "train_gpt2.py"
        rows = [row for row in load(path.stem) if row["case"].get("script", script) == script]
        newest_of = {row["unit"]: row["commit"] for row in rows}
        for commit in dict.fromkeys(newest_of.values()):
            count = ["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD", "--", script]
            done = subprocess.run(count, capture_output=True, text=True)
            age = done.stdout.strip() or "unknown"
            lines.append(f"{path.stem}: {commit}, {age} commits of {script} ago")
    return lines


def main() -> int:
    differ = [page for page in PAGES if fill(page.read_text()) != page.read_text()]
    print(*ages(), sep="\n")
    for page in differ:
        print(f"{page.relative_to(ROOT)} differs from its rows")
        if "--check" not in sys.argv:
            page.write_text(fill(page.read_text()))
    return len(differ) if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
