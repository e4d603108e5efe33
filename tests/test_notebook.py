"""The notebook: it runs from top to bottom offline, every plot has data, and it reads every log."""

import os
import re

import nbformat
import numpy as np
import pytest
from conftest import ROOT
from nbclient import NotebookClient

NOTEBOOK = nbformat.read(ROOT / "play.ipynb", 4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]

CHECK = """
for number in plt.get_fignums():
    for axes in plt.figure(number).axes:
        drawn = [line.get_ydata() for line in axes.lines] + [image.get_array() for image in axes.images]
        drawn += [[bar.get_height() for bar in axes.patches]] if axes.patches else []
        scale = axes in [image.colorbar.ax for a in plt.figure(number).axes for image in a.images
                         if image.colorbar]
        assert scale or (drawn and all(len(d) and np.isfinite(np.asarray(d)).all() for d in drawn))
        assert axes.get_xlabel() or axes.get_ylabel(), "an axis says what it shows"
print("checked", len(plt.get_fignums()))
"""


def test_it_runs_offline_from_top_to_bottom_and_every_plot_has_data(tmp_path, monkeypatch):
    """A cell that needs what an older version had, or a figure that stays empty on a fresh clone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.from_dict(NOTEBOOK)
    plots = 0
    for cell in notebook.cells:
        if cell.cell_type == "code" and "plt.subplots" in cell.source:
            cell.source += "\n" + CHECK
            plots += 1
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=dict(os.environ))
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert [int(n) for n in re.findall(r"checked (\d+)", printed)].count(1) == plots - 1
    assert plots == 10 and "no `hella` records" in printed, "the quickstart has none"
    assert "no run in log/quickstart yet" in printed


def test_outputs_are_kept_and_tell_nothing_of_where_they_were_made():
    """A notebook that shows nothing on the web, or a path of somebody's machine."""
    images = [o for c in CODE for o in c.outputs if "image/png" in o.get("data", {})]
    assert len(images) == 9
    assert not [o for c in CODE for o in c.outputs if o.output_type == "error"]
    text = "".join(o.get("text", "") for c in CODE for o in c.outputs)
    assert not re.search(r"(?:^|\s)/\w+/", text)
    assert (ROOT / "play.ipynb").stat().st_size < 700_000


@pytest.fixture
def read_log():
    """Return the notebook's function of that name."""
    [source] = [cell.source for cell in CODE if "def read_log" in cell.source]
    namespace = {"np": np, "Path": __import__("pathlib").Path}
    exec(source[source.index("def read_log") : source.index("def read_run")], namespace)
    return namespace["read_log"]


def test_a_resumed_log_and_one_of_build_nanogpt_read_alike(read_log, tmp_path):
    """Steps drawn twice, or a stream that another program does not write taken for granted."""
    (tmp_path / "log.txt").write_text(
        "0 train 5.0\n1 train 4.0\n2 train 9.0\n1 train 4.5\n0 val 5.1\n"
    )
    log = read_log(tmp_path)
    assert log["train"].tolist() == [[0, 1, 2], [5.0, 4.5, 9.0]]
    (tmp_path / "log.txt").write_text("0 val 10.9\n0 hella 0.2463\n0 train 10.95\n")
    assert set(read_log(tmp_path)) == {"val", "hella", "train"}
