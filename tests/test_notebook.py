"""The notebook: its experiments apply to train_gpt2.py as it is, and every cell runs offline."""

import os
import re
import shutil
import subprocess
import sys
import time

import nbclient
import nbformat
import pytest
from conftest import ROOT

import train_gpt2

NOTEBOOK = nbformat.read(ROOT / "play.ipynb", 4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def run_cells(*numbers, **variables):
    """Execute code cells in a scope of their own, and return its variables."""
    for number in numbers:
        exec(CODE[number].source, variables)
    return variables


EXPERIMENTS = run_cells(0, 2)["EXPERIMENTS"]
HEADER = "0 total_batch_size 768\n0 vocab_size 257\n"  # with which each log.txt begins


def images(cell):
    """Return the figures among the outputs of a cell."""
    return [output for output in cell.outputs if "image/png" in output.get("data", {})]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_sets_flags_or_changes_one_to_three_lines_of_the_script(name):
    """The notebook finds each line of train_gpt2.py that it changes, and the result compiles."""
    script = changed = (ROOT / "train_gpt2.py").read_text()
    flags, changes = EXPERIMENTS[name]
    train_gpt2.parse(flags.split())  # exits if the script does not have them
    for old, new in changes:
        assert script.count(old) == 1, old
        assert changed.count(old) == 1, "one change undoes what another looks for"
        changed = changed.replace(old, new)
    compile(changed, "train_gpt2.py", "exec")
    lines = list(zip(script.splitlines(), changed.splitlines(), strict=True))
    assert sum(old != new for old, new in lines) <= 3
    assert name == "unchanged" or script != changed or flags


def test_the_second_cell_draws_a_run_that_goes_on(tmp_path, monkeypatch):
    """A last line that is half written is left out, and so is a stream that has no value yet."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log/mine/log.txt"
    log.parent.mkdir(parents=True)
    log.write_text(f"{HEADER}0 val 5.5\n0 train 5.6\n1 train 5.4\n1 tr")
    cell = run_cells(0, 1)
    assert cell["read_stream"](log, "train").tolist() == [[0, 1], [5.6, 5.4]]
    (figure,) = map(cell["plt"].figure, cell["plt"].get_fignums())
    assert len(figure.axes) == 1  # nothing of HellaSwag
    cell["plt"].close(figure)


OTHER_LOGS = {  # what a log.txt may hold, and whether it can be drawn
    "build-nanogpt": ("0 val 10.95\n0 hella 0.2463\n0 train 10.95\n1 train 9.5\n", False),
    "cut at its front": ("rain 5.6\n7 train 5.4\n8 train 5.3\n8 val 5.2\n", False),
    "no text": ("\udcff\udcfe\n", False),
    "val is inf": (f"{HEADER}0 val 5.5\n0 train 5.6\n1 train 5.5\n2 val inf\n", True),
    "val is nan": (f"{HEADER}0 val 5.5\n0 train 5.6\n1 train nan\n2 val nan\n", True),
}


@pytest.mark.parametrize("name", OTHER_LOGS)
def test_the_second_cell_draws_other_logs_or_names_them(tmp_path, monkeypatch, capsys, name):
    """Another program's log, or a damaged one, hides no run that stands beside it."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    records, is_drawn = OTHER_LOGS[name]
    good = f"{HEADER}0 val 5.5\n0 train 5.6\n1 train 5.4\n2 val 5.1\n"
    for folder, text in (("good", good), ("other", records)):
        path = tmp_path / "log" / folder / "log.txt"
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    plt = run_cells(0, 1)["plt"]
    (figure,) = map(plt.figure, plt.get_fignums())
    figure.canvas.draw()
    labels = [text.get_text() for text in figure.axes[0].texts]
    plt.close(figure)
    assert "good 5.100" in labels
    assert any(label.startswith("other ") for label in labels) == is_drawn
    assert ("log/other/log.txt is left out" in capsys.readouterr().out) != is_drawn


def test_the_cell_that_trains_may_be_executed_again(monkeypatch):
    """While its runs go on, too, as after a change: no two of them write into one folder."""
    monkeypatch.setattr("subprocess.run", lambda *command, **settings: None)  # makes the data
    training = set()

    def train(*settings):
        run = str(settings)
        assert run not in training
        training.add(run)
        time.sleep(0.1)
        training.remove(run)

    scope = run_cells(0, 2) | {"train": train}
    scope = run_cells(3, 3, **scope)
    results = [run.result() for run in scope["log_dirs"].values()]  # raises what a run has raised
    scope["pool"].shutdown(cancel_futures=True)
    assert len(results) == len(EXPERIMENTS)


def test_a_change_may_have_any_letter_in_any_locale(tmp_path):
    """As on Windows, where Python reads and writes files in UTF-8 only if somebody says so."""
    script = 'print("sample 0: a")  # größer'
    (tmp_path / "train_gpt2.py").write_text(script, "utf-8")
    code = f"STEPS = 1\n{CODE[0].source}\nprint(train('', [('größer', '更大')]))"
    (tmp_path / "cell.py").write_text(code, "utf-8")
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "cell.py"]
    out = subprocess.check_output(command, cwd=tmp_path, env=env | {"MPLBACKEND": "agg"}, text=True)
    changed = tmp_path / out.split()[-1] / "train_gpt2.py"
    assert changed.read_text("utf-8") == script.replace("größer", "更大")


def test_stored_outputs_are_whole_and_show_every_experiment():
    """No cell shows an error or somebody's paths, and none has lost its figure or its text."""
    for cell in CODE:
        assert not [output for output in cell.outputs if output.output_type == "error"]
        draws = re.search(r"(?m)^(show\(|draw\(|figure, )", cell.source)
        assert bool(draws) == bool(images(cell))
        assert not re.search(r"/(work|home|tmp|Users)/", printed(cell))
    everything = "".join(map(printed, CODE))
    for name, (flags, changes) in EXPERIMENTS.items():
        for text in (f"{name}: val loss ", flags, *dict(changes).values()):
            assert text in everything, "the stored output is of an older version"


def test_the_long_part_makes_the_runs_whose_losses_are_stored(monkeypatch):
    """With PLAY_LONG the notebook trains, and without it reads rows: both have the same cases."""
    monkeypatch.chdir(ROOT)
    (number,) = (i for i, cell in enumerate(CODE) if "PLAY_LONG" in cell.source)
    stored = run_cells(0, 2, number)["ladder"]

    class Pool:
        def map(self, train, cases):
            return [stored[case] for case in cases]

    monkeypatch.setenv("PLAY_LONG", "1")
    assert run_cells(0, 2, number, pool=Pool())["ladder"] == stored


@pytest.mark.slow
def test_every_cell_runs_offline_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """No cell needs what an older version of a script had, or what only one machine has."""
    for name in ("train_gpt2.py", "fineweb.py"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("tests/benchmarks/runs", "tests/benchmarks/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setenv("PLAY_STEPS", "10")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers: a download fails
    figures = [len(images(cell)) for cell in CODE]
    copy = nbformat.from_dict(NOTEBOOK)
    notebook = nbclient.execute(copy, cwd=str(tmp_path), timeout=600)  # raises a cell's error
    assert [len(images(cell)) for cell in notebook.cells if cell.cell_type == "code"] == figures
