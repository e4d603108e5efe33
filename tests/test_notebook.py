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
SOURCE = "\n".join(cell.source for cell in CODE)
EXPERIMENTS = ast.literal_eval(re.search(r"(?ms)^EXPERIMENTS = (.*?^})", SOURCE)[1])


def images(cell):
    """Return the figures among the outputs of a cell."""
    return [output for output in cell.outputs if "image/png" in output.get("data", {})]


def printed(cell):
    """Return what a cell has printed."""
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_changes_one_to_three_lines_of_the_script(name):
    """The notebook finds each line of train_gpt2.py that it changes, and the result compiles."""
    script = changed = (ROOT / "train_gpt2.py").read_text()
    for old, new in EXPERIMENTS[name]:
        assert script.count(old) == 1, old
        assert changed.count(old) == 1, "one change undoes what another looks for"
        changed = changed.replace(old, new)
    compile(changed, "train_gpt2.py", "exec")
    lines = list(zip(script.splitlines(), changed.splitlines(), strict=True))
    assert sum(old != new for old, new in lines) <= 3
    assert name == "unchanged" or script != changed


def test_stored_outputs_are_whole_and_show_every_experiment():
    """No cell shows an error or somebody's paths, and none has lost its figure or its text."""
    shown = {}
    for cell in CODE:
        assert not [output for output in cell.outputs if output.output_type == "error"]
        assert ("plt.subplots" in cell.source) == bool(images(cell)) or "show(" in cell.source
        assert not re.search(r"/(work|home|tmp|Users)/", printed(cell))
        for call in re.findall(r"^show\((.*)\)", cell.source, re.M):
            shown |= dict.fromkeys(ast.literal_eval(f"[{call}]"), cell)
    assert shown.keys() == EXPERIMENTS.keys()
    for name, cell in shown.items():
        assert len(images(cell)) == 1
        assert f"{name}: val loss " in printed(cell)
        for _, new in EXPERIMENTS[name]:
            assert new in printed(cell), "the stored output is of an older version"


@pytest.mark.slow
def test_every_cell_runs_offline_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """No cell needs what an older version of a script had, or what only one machine has."""
    for name in ("train_gpt2.py", "fineweb.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tests/benchmarks/runs", tmp_path / "tests/benchmarks/runs")
    monkeypatch.setenv("PLAY_STEPS", "10")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers: a download fails
    notebook = nbformat.from_dict(NOTEBOOK)
    figures = [len(images(cell)) for cell in CODE]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()  # raises a cell's error
    assert [len(images(cell)) for cell in notebook.cells if cell.cell_type == "code"] == figures
