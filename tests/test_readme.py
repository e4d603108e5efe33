"""The two README.md: every command in them works, and what they count, link and repeat is true."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tiktoken
import torch
from conftest import ROOT, make_run, write_shards
from test_hellaswag import write_examples

import fineweb
import hellaswag
import train_gpt2
from train_gpt2 import GPT

PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "tests/benchmarks/README.md")
}
README, BENCHMARKS = PAGES.values()
SCRIPTS = {"train_gpt2.py": train_gpt2, "fineweb.py": fineweb, "hellaswag.py": hellaswag}
PLACEHOLDERS = {"DTYPE": "tf32", "SEED": "1", "MODEL": "d24", "T": "1024", "B": "8"}
PLACEHOLDERS |= {"TOTAL": "65536", "$SLURM_ARRAY_TASK_ID/128": "3/128"}


class Command(NamedTuple):
    text: str  # without launcher: "train_gpt2.py --resume"
    launcher: str  # "python", or torchrun with its flags
    marked: bool  # it is said not to have been run


def find_commands(page: str) -> list[Command]:
    """Return the commands of a page, from its blocks of code and from code within the text."""
    found = []
    pattern = r"(python|torchrun\b[^#;&]*?) ((?:tests/benchmarks/)?\w+\.py\b[^#;&]*)"
    for before, block in re.findall(r"(?:^|\n\n)([^`]*?)\n*```\n(.*?)```", page, re.DOTALL):
        paragraph = before.split("\n\n")[-1]
        for line in block.replace("\\\n", " ").splitlines():
            # a star refers to the note below the block
            marked = "not run" in line + paragraph or line.endswith(" *")
            found += [
                Command(c.strip(), launcher, marked) for launcher, c in re.findall(pattern, line)
            ]
    text = re.sub(r"```\n.*?```", "", page, flags=re.DOTALL)
    for paragraph in re.split(r"\n\n|\n(?=\|)", text):  # a row of a table is one too
        for code in re.findall(r"`([^`]+)`", paragraph):
            for launcher, command in re.findall(pattern, " ".join(code.split())):
                if " " in command or "|" in paragraph:  # else it is a name in a sentence
                    found.append(Command(command.strip(), launcher, "not run" in paragraph))
    return found


COMMANDS = {name: find_commands(page) for name, page in PAGES.items()}


def test_there_are_commands():
    """A pattern that finds none would pass all the others."""
    assert len(COMMANDS["README.md"]) > 25 and len(COMMANDS["tests/benchmarks/README.md"]) > 10
    assert any(command.marked for command in COMMANDS["README.md"])


@pytest.mark.parametrize("command", sorted({c.text for page in COMMANDS.values() for c in page}))
def test_a_command_is_one_that_its_script_takes(command, monkeypatch):
    """A flag that was renamed, a value that is no longer one."""
    script, *argv = (PLACEHOLDERS.get(word, word) for word in shlex.split(command))
    if argv == ["--help"]:
        return
    if script in SCRIPTS:
        SCRIPTS[script].parse_args(argv)
        return

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *args):
        parse(self, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *argv])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


SMALL = "--device cpu --val_tokens 640 --max_steps 2 --num_samples 1 --max_new_tokens 4"
TEST_SIZE = f"{SMALL} --model test --total_batch_size 256"
# The README's commands in an order in which they can be run, each with flags that make it small
RUNS = [
    ("fineweb.py --dataset pydocs", ""),
    ("train_gpt2.py --quickstart", SMALL),
    ("train_gpt2.py --quickstart --resume --max_steps 3000", f"{SMALL} --max_steps 4"),
    ("train_gpt2.py --quickstart --max_steps 100 --log_dir log/try", SMALL),
    ("train_gpt2.py --sample --init_from log/quickstart --seed 1", SMALL),
    (
        'train_gpt2.py --sample --init_from log/quickstart --prompt "class " --temperature 0.8',
        SMALL,
    ),
    ("fineweb.py --files 'texts/*.txt' --tokenizer bytes --out mine", ""),
    ("fineweb.py --files 'texts/*.txt' --out mine", "--tokenizer bytes"),
    ("fineweb.py --verify --out mine", ""),
    ('train_gpt2.py --quickstart --data_dir mine --log_dir log/mine --prompt "The "', SMALL),
    ("train_gpt2.py", TEST_SIZE),
    ("train_gpt2.py --resume", "--device cpu --max_steps 4"),
    ("train_gpt2.py --overwrite", TEST_SIZE),
    ("train_gpt2.py --sample --init_from log", SMALL),
    ("train_gpt2.py --init_from log --export_hf folder", ""),
    ("hellaswag.py -m log", "--data raw.jsonl -d cpu"),
    ("train_gpt2.py --help", ""),
]


def test_every_command_in_the_readme_is_run_here_or_marked():
    """A command that nobody has tried, and that does not say so. (CI runs the first lines, which
    install everything, and pytest.)"""
    unmarked = {c.text for c in COMMANDS["README.md"] if not c.marked}
    assert unmarked == {command for command, _ in RUNS}
    launchers = {c.launcher for c in COMMANDS["README.md"] if not c.marked}
    assert launchers == {"python"}, "test_sharding.py runs torchrun, and not the README's commands"


def test_the_commands_in_the_readme_do_their_work(tmp_path, monkeypatch, capsys):
    """A command whose flags are all known, and which fails all the same."""
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "edu_fineweb10B")  # instead of the 20 GB
    write_examples(tmp_path / "raw.jsonl")
    Path("texts").mkdir()
    for i in range(20):
        text = f"The text number {i} of many. " * 20
        Path("texts", f"{i}.txt").write_text(text)
    for command, flags in RUNS:
        script, *argv = shlex.split(f"{command} {flags}")
        status = 0
        try:
            SCRIPTS[script].main(argv)
        except SystemExit as end:
            status = end.code
        assert status in (0, None), (command, capsys.readouterr().err)
    assert Path("folder", "model.safetensors").is_file() and Path("log", "model_00002.pt").is_file()


def test_line_counts_are_nearly_true():
    """A table that was right once."""
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|.*\| ([\d,]+) \|$", README, re.MULTILINE)
    assert [name for name, _ in rows] == list(SCRIPTS)
    for name, said in rows:
        lines = len((ROOT / name).read_text().splitlines())
        assert abs(int(said.replace(",", "")) / lines - 1) < 0.05, (name, lines)


def slugs(page: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_inside_the_repository_resolve(name):
    """A file that was moved, a heading that was renamed."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[name]) if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in slugs(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", PAGES)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(name):
    """A bar that is missing, or one in a cell's text: GitHub then drops what is too much."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGES[name], re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(cells) == 1, table


def test_the_table_of_batch_sizes_is_what_the_script_chooses(monkeypatch):
    """A formula that was corrected, and the table was not."""
    heads = re.search(r"^\| model \| parameters \|(.*)\|$", README, re.MULTILINE)[1]
    sizes = [int(gb) for gb in re.findall(r"(\d+) GB", heads)]
    rows = re.findall(r"^\| (d\d+)\b[^|]*\| ([\d.]+)([MB]) \|(.*)\|[^|]*\|$", README, re.MULTILINE)
    assert sizes == [16, 24, 40, 80]
    assert [row[0] for row in rows] == ["d12", "d24", "d36", "d48", "d60", "d72"]
    run = train_gpt2.Run(torch.device("cuda"), "bfloat16", True, 0, 1)
    for name, number, unit, cells in rows:
        config = train_gpt2.GPTConfig(*train_gpt2.SIZES[name][:4])
        with torch.device("meta"):
            model = GPT(config)
        parameters = sum(p.numel() for p in model.parameters())
        assert abs(parameters / (float(number) * {"M": 1e6, "B": 1e9}[unit]) - 1) < 0.03, name
        monkeypatch.setattr(train_gpt2, "GPT", lambda config, model=model: model)  # made only once
        for gb, cell in zip(sizes, cells.split("|"), strict=True):
            card = argparse.Namespace(total_memory=gb * 1e9)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
            best = []
            for flags in ([], ["--recompute"]):
                args = train_gpt2.parse_args(["--seq_len", "1024", *flags])
                try:
                    best.append(str(train_gpt2.choose_batch_size(args, config, run)))
                except fineweb.UserError:
                    best.append("-")
            expected = "-" if best == ["-", "-"] else ", ".join(best)
            assert cell.strip() == expected, (name, gb)


def test_the_recipes_name_what_there_is():
    """A function that was renamed after somebody wrote down how to change it."""
    section = re.search(r"\n## How to change things\n(.*?)\n## ", README, re.DOTALL)[1]
    rows = re.findall(r"^\| the \w+ \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 5
    names = re.findall(r"`([A-Za-z]\w+(?:\.\w+)*)`", section)
    assert {"SCHEDULES", "MLP.forward", "GPT.configure_optimizers", "open_source"} <= set(names)
    for name in names:
        found = []
        for thing in (train_gpt2, fineweb, tiktoken):
            for part in name.removeprefix("tiktoken.").split("."):
                thing = getattr(thing, part, None)
            found.append(thing)
        assert any(thing is not None for thing in found), name


def test_defaults_in_the_readme_are_the_scripts_own(tmp_path):
    """A default that is said in words, and changed in code alone."""
    args, tiny = train_gpt2.parse_args([]), train_gpt2.parse_args(["--quickstart"])
    assert args.max_steps == 10**10 // args.total_batch_size
    here = train_gpt2.parse_args(["--data_dir", str(tmp_path)])
    settled, config, _ = train_gpt2.settle_args(here, {}, make_run())
    assert settled.hellaswag_every == 0, "never on a CPU"
    assert (settled.model, settled.warmup_steps, settled.max_lr) == ("d12", 715, 6e-4)
    assert settled.min_lr == pytest.approx(6e-5) and config == train_gpt2.GPTConfig()
    muon = train_gpt2.parse_args(["--data_dir", str(tmp_path), "--optimizer", "muon"])
    muon, _, _ = train_gpt2.settle_args(muon, {}, make_run())
    said = [
        f"Every step is {args.total_batch_size:,} tokens",
        f"{args.max_steps:,} steps of {args.total_batch_size:,} tokens",
        f"log/model_{args.max_steps}.pt",
        f"over {args.val_tokens / 1e6:.1f}M tokens",
        f"every {args.val_every} steps",
        f"step  {tiny.max_steps}/{tiny.max_steps} | val loss",
        f"log/quickstart/model_{tiny.max_steps:05d}.pt",
        args.data_dir,
        f"{muon.max_lr / settled.max_lr:.0f} times GPT-3's learning rate, the {muon.schedule}"
        f" schedule down to {muon.min_lr:g}, weight decay {muon.weight_decay} and"
        f" {muon.warmup_steps} steps of warmup",
        f"longer than {fineweb.SEGMENT_CHARS:,} characters",
        f"at most {fineweb.PIECE:,} tokens",
    ]
    flat = " ".join(README.split())
    missing = [text for text in said if " ".join(text.split()) not in flat]
    assert not missing, missing


def test_times_and_costs_follow_from_the_speeds():
    """One of three numbers in a row that was measured again, and the others were not."""
    rows = re.findall(
        r"\| ([\d,]+) \([^|]*\| ([\d.]+) (minutes|hours|days) \| \$([\d.]+) \| \$(\d+) \|",
        BENCHMARKS,
    )
    assert len(rows) == 4
    for speed, time, unit, price, cost in rows:
        hours = 1e10 / float(speed.replace(",", "")) / 3600
        said = float(time) * {"minutes": 1 / 60, "hours": 1, "days": 24}[unit]
        assert abs(said / hours - 1) < 0.04, (speed, time, unit)
        gpus = 8 if unit == "minutes" else 1
        assert abs(gpus * hours * float(price) - float(cost)) < 1, (speed, cost)


def test_the_first_screens_speed_is_that_of_the_tables():
    """The number that everybody reads, and the one that somebody measured."""
    (headline,) = re.findall(r"GPT-2 124M at ([\d,]+) tokens a second", README)
    assert f"median {headline} tok/s" in BENCHMARKS and f"{headline} (measured)" in BENCHMARKS
    (seconds,) = re.findall(r"steps of ([\d.]+) s on one H100", README)
    assert seconds == f"{2**19 / int(headline.replace(',', '')):.2f}"
    pattern = r"\| ([\d, ]+) tok/s; plainly compiled ([\d, ]+): ([\d.]+) times"
    measured = re.findall(pattern, BENCHMARKS)
    ours, plain = ([int(n.replace(",", "")) for n in part.split()] for part in measured[0][:2])
    assert f"{sum(ours) / sum(plain):.2f}" == measured[0][2]


# what: (where README.md says it, where tests/benchmarks/README.md says it)
TWICE = {
    "our speed on one H100": (
        r"the median of 29 steps \(([\d,]+) to ([\d,]+)\) \| ([\d,]+) ",
        r"median ([\d,]+) tok/s of 29 steps \(([\d,]+) to ([\d,]+)\)",
    ),
    "llm.c's": (r"llm\.c with cuDNN, B 64 \| ([\d,]+) ", r"llm\.c with cuDNN ([\d,]+) "),
    "build-nanogpt's": (
        r"with compile, and as published \| ([\d,]+), ([\d,]+) ",
        r"build-nanogpt makes ([\d,]+) tok/s as published and ([\d,]+) with compile",
    ),
    "a step with either optimizer": (
        r"takes ([\d.]+)% longer on one H100 \((\d+) ms with AdamW, (\d+) to (\d+) with Muon\)",
        r"takes (\d+) ms with AdamW and (\d+) to (\d+) ms with Muon, ([\d.]+)% more",
    ),
    "losses on four GPUs": (
        r"every loss was within ([\d.]+\d)",
        r"within ([\d.]+\d) of one GPU's \|",
    ),
    "scaling": (
        r"train at (\d+) to (\d+)% of.*?at (\d+) to (\d+)% of four.*?reach (\d+) to (\d+)%, "
        r"and four (\d+) to (\d+)%",
        # on two GPUs, on four in the table, and on four with earlier versions below it
        r"\| 524,288 \|.*?\| (\d+)% \|.*?\| (\d+)% \|.*?four: 232.*?% \|.*?"
        + r"\| (\d+)% \|.*?" * 3
        + r", (\d+)% of linear; .*?, (\d+)% of linear \(.*?four H200 took 122.5 ms \((\d+)%\)",
    ),
    "sharded models": (
        r"trains at ([\d,]+) .*? with `--zero 2` and ([\d,]+) with `--zero 3`.*?at ([\d,]+) ",
        r"to 1,351\) \| ([\d,]+) .*?to 1,371\) \| ([\d,]+) .*?to 4,051\) \| ([\d,]+) ",
    ),
}


@pytest.mark.parametrize("what", TWICE)
def test_a_number_that_stands_twice_is_the_same(what):
    """A measurement that was repeated, and entered in one of two places."""
    found = []
    for page, pattern in zip(PAGES.values(), TWICE[what], strict=True):
        match = re.search(pattern, " ".join(page.split()))
        assert match, pattern
        found.append(sorted(match.groups()))
    assert found[0] == found[1]


def test_the_quickstarts_losses_are_those_in_the_notebook():
    """A quickstart that learns otherwise, and one of two pages that still shows the old loss."""
    notebook = (ROOT / "play.ipynb").read_text(encoding="utf-8")
    flat = " ".join(README.split())
    (muon,) = re.findall(r"step 1400/1400 \| val loss: ([\d.]+)", flat)
    (adamw,) = re.findall(r"the val loss is ([\d.]+)\)", flat)
    assert re.search(rf"val loss +{adamw} .* {muon} ", notebook)
