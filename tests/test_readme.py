"""The README: its commands are ones the scripts take, its counts and links are true."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, make_run

import fineweb
import train_gpt2

README = (ROOT / "README.md").read_text()
PLACEHOLDERS = {"DTYPE": "tf32", "SEED": "1"}


def find_commands() -> list[str]:
    """Return every command of a script in the README, without its launcher."""
    blocks = re.findall(r"```\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    text = re.sub(r"```\n.*?```", "", README, flags=re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    pattern = r"((?:train_gpt2|fineweb|hellaswag)\.py\b[^#;&`]*)"
    return sorted({match.strip() for line in lines for match in re.findall(pattern, line)})


COMMANDS = find_commands()


def test_there_are_commands():
    """A pattern that finds none would pass all the others."""
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_the_readme_is_one_that_its_script_takes(command):
    """A flag that was renamed, a value that is no longer one."""
    script, *argv = (PLACEHOLDERS.get(word, word) for word in shlex.split(command))
    if any(word in ("--help", "...") for word in argv):
        return
    if script == "train_gpt2.py":
        train_gpt2.parse_args(argv)
    elif script == "fineweb.py":
        fineweb.parse_args([word.replace("$SLURM_ARRAY_TASK_ID", "3") for word in argv])
    else:
        assert argv == [] or argv[0] == "-m"


def test_line_counts_are_true():
    """A table that was right once."""
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|.*\| (\d+) \|$", README, re.MULTILINE)
    assert [name for name, _ in rows] == ["train_gpt2.py", "fineweb.py", "hellaswag.py"]
    for name, lines in rows:
        assert len((ROOT / name).read_text().splitlines()) == int(lines), name


def test_links_inside_the_repository_resolve():
    """A file that was moved."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / Path(link.split("#")[0])).exists(), link


def test_defaults_in_the_readme_are_the_scripts_own(tmp_path):
    """A default that is said in words, and changed in code alone."""
    args, tiny = train_gpt2.parse_args([]), train_gpt2.parse_args(["--quickstart"])
    assert args.max_steps == 10**10 // args.total_batch_size
    here = train_gpt2.parse_args(["--data_dir", str(tmp_path)])
    settled, config, _ = train_gpt2.settle_args(here, {}, make_run())
    assert settled.hellaswag_every == 0, "never on a CPU"
    assert (settled.model, settled.warmup_steps, settled.max_lr) == ("d12", 715, 6e-4)
    assert settled.min_lr == pytest.approx(6e-5) and config == train_gpt2.GPTConfig()
    said = [
        f"Every step is {args.total_batch_size:,} tokens",
        f"{args.max_steps:,} steps of {args.total_batch_size:,} tokens",
        f"log/model_{args.max_steps}.pt",
        f"over {args.val_tokens / 1e6:.1f}M tokens",
        f"every {args.val_every} steps",
        f"step  {tiny.max_steps}/{tiny.max_steps} | val loss",
        f"log/quickstart/model_{tiny.max_steps:05d}.pt",
        args.data_dir,
    ]
    missing = [text for text in said if text not in README]
    assert not missing, missing


def test_times_and_costs_follow_from_the_speeds():
    """One of three numbers in a row that was measured again, and the others were not."""
    rows = re.findall(
        r"\| ([\d,]+) \([^|]*\| ([\d.]+) (minutes|hours|days) \| \$([\d.]+) \| \$(\d+) \|", README
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
    assert f"median {headline} tok/s" in README and f"{headline} (measured)" in README
    measured = re.findall(r"\| ([\d, ]+) tok/s; plainly compiled ([\d, ]+): ([\d.]+) times", README)
    ours, plain = ([int(n.replace(",", "")) for n in part.split()] for part in measured[0][:2])
    assert f"{sum(ours) / sum(plain):.2f}" == measured[0][2]
