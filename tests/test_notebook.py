"""The notebook: its experiments apply to train_gpt2.py as it is, and every cell runs offline."""

import ast
import re
import shutil

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

NOTEBOOK = nbformat.read(ROOT / "play.ipynb", 4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def read_experiments():
    """Return EXPERIMENTS of the notebook without running it."""
    for cell in CODE:
        for node in ast.parse(cell.source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPERIMENTS":
                return ast.literal_eval(node.value)
    raise AssertionError("no cell assigns EXPERIMENTS")


EXPERIMENTS = read_experiments()


def images(cell):
    """Return the figures among the outputs of a cell."""
    return [output for output in cell.outputs if "image/png" in output.get("data", {})]


def printed(cell):
    """Return what a cell has printed."""
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_changes_one_to_three_lines_of_the_script(name):
    """A line of train_gpt2.py was rewritten, and the notebook no longer finds it."""
    script = changed = (ROOT / "train_gpt2.py").read_text()
    for old, new in EXPERIMENTS[name]:
        assert script.count(old) == 1, old
        assert changed.count(old) == 1, "one change undoes what another looks for"
        changed = changed.replace(old, new)
    compile(changed, "train_gpt2.py", "exec")
    lines = list(zip(script.splitlines(), changed.splitlines(), strict=True))
    assert sum(old != new for old, new in lines) <= 3
    assert name == "unchanged" or script != changed


def test_every_experiment_is_shown_with_a_figure_and_what_its_model_writes():
    """An experiment that trains for minutes and is never looked at, or a figure that is missing."""
    shown = {}
    for cell in CODE:
        for call in re.findall(r"^show\((.*)\)", cell.source, re.MULTILINE):
            shown |= dict.fromkeys(ast.literal_eval(f"[{call}]"), cell)
    assert shown.keys() == EXPERIMENTS.keys()
    for name, cell in shown.items():
        assert len(images(cell)) == 1
        assert f"{name}: val loss " in printed(cell)
        for _, new in EXPERIMENTS[name]:
            assert new in printed(cell), "the stored output is of an older version"


def test_stored_outputs_are_whole_and_small():
    """A notebook that shows an error on the web, or nothing, or somebody's paths."""
    for cell in CODE:
        assert not [output for output in cell.outputs if output.output_type == "error"]
        assert ("plt.subplots" in cell.source) == bool(images(cell)) or "show(" in cell.source
        assert not re.search(r"/(work|home|tmp|Users)/", printed(cell))
    assert (ROOT / "play.ipynb").stat().st_size < 700_000


def test_the_first_figure_comes_within_40_lines():
    """A reader has to scroll through plumbing before there is anything to see."""
    assert len(CODE[0].source.splitlines()) <= 40
    assert images(CODE[0])


@pytest.mark.slow
def test_every_cell_runs_offline_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """A cell that needs what an older version of a script had, or what only one machine has."""
    for name in ("train_gpt2.py", "fineweb.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tests/benchmarks/runs", tmp_path / "tests/benchmarks/runs")
    monkeypatch.setenv("PLAY_STEPS", "10")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers: a download fails
    notebook = nbformat.from_dict(NOTEBOOK)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()  # raises a cell's error
    for before, cell in zip(NOTEBOOK.cells, notebook.cells, strict=True):
        if cell.cell_type == "code":
            assert len(images(cell)) == len(images(before))
