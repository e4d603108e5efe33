"""The README: its commands are ones the scripts take, its counts and links are true."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT

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
    pattern = r"((?:train_gpt2|fineweb|hellaswag)\.py\b[^#;`]*)"
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
