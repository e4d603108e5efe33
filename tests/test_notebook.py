"""The notebook: it runs from top to bottom offline, every plot has data, and it reads every log."""

import os
import re

import matplotlib
import nbformat
import numpy as np
import pytest
import torch
from conftest import DATA, ROOT, save_model
from nbclient import NotebookClient

import train_gpt2

NOTEBOOK = nbformat.read(ROOT / "play.ipynb", 4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
FIRST_HALF = ["losses", "compared", "hellaswag", "speed"]

CHECK = """
for number in plt.get_fignums():
    for axes in plt.figure(number).axes:
        drawn = [line.get_ydata() for line in axes.lines] + [image.get_array() for image in axes.images]
        drawn += [[bar.get_width() for bar in axes.patches]] if axes.patches else []
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
    assert plots == 11 and "no `hella` records" in printed, "the quickstart has none"
    assert "There is no run in log/quickstart" in printed


def test_outputs_are_kept_and_tell_nothing_of_where_they_were_made():
    """A notebook that shows nothing on the web, or a path of somebody's machine."""
    images = [o for c in CODE for o in c.outputs if "image/png" in o.get("data", {})]
    assert len(images) == 10
    assert not [o for c in CODE for o in c.outputs if o.output_type == "error"]
    text = "".join(o.get("text", "") for c in CODE for o in c.outputs)
    assert not re.search(r"(?:^|\s)/\w+/", text)
    assert (ROOT / "play.ipynb").stat().st_size < 700_000


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return a function that runs cells in this process, for the folders given by name, and returns
    the cells' variables. `figures` among them has the figures of the first half by name."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())

    def run_cells(*log_dirs, until=None, **settings):
        variables = {"__name__": "play"}
        exec(CODE[0].source, variables)
        variables |= {"log_dirs": list(log_dirs), "figures": {}, **settings}
        for cell in CODE[1:]:
            if until and until in cell.source:
                break
            variables.pop("fig", None)
            # The timing of attention is slow, and the same for every run: only its functions
            exec(cell.source.split("lengths, plain, flash =")[0], variables)
            for name in FIRST_HALF:
                if f'"{name}")' in cell.source and "fig" in variables:
                    variables["figures"][name] = variables["fig"]
                    variables["fig"].canvas.draw()
        return variables

    yield run_cells
    matplotlib.pyplot.close("all")


SECOND_HALF = "t.load_source("


def write_log(folder, streams=("train", "lr", "norm", "dt"), steps=100, records=""):
    """Write a log.txt with a loss of 11 that falls to 3, and a val loss every 20 steps."""
    values = {"train": 3, "lr": 6e-4, "norm": 0.5, "dt": 100}
    lines = [records]
    for step in range(steps):
        if step % 20 == 0:
            lines.append(f"{step} val {3.1 + 8 * np.exp(-step / 10):.4f}\n")
        for stream in streams:
            value = values[stream] + 8 * (stream == "train") * np.exp(-step / 10)
            lines.append(f"{step} {stream} {value:.6f}\n")
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text("".join(lines))


def curves(ax):
    """Return {label: (x, y)} of the lines that a legend names."""
    return {line.get_label(): line.get_data() for line in ax.lines if line.get_label()[0] != "_"}


def legend(fig):
    """Return the texts of a figure's legend."""
    return [text.get_text() for text in fig.legends[0].get_texts()]


@pytest.mark.parametrize(
    "text, stream, expected",
    [
        ("0 train 5.0\n1 train 4.0\n2 train 9.0\n1 train 4.5\n", "train", [[0, 1, 2], [5, 4.5, 9]]),
        ("0 val 10.9\n0 hella 0.2463\n0 train 10.95\n", "hella", [[0], [0.2463]]),
        ("0 train 5.0\n1 train nan\n2 train inf\n", "train", [[0, 1, 2], [5, np.nan, np.inf]]),
        ("0 lr 6.0000e-04\n1 lr 0\n", "lr", [[0, 1], [6e-4, 0]]),
        ("0 train 5.0\n1 train 4.12", "train", [[0], [5]]),
        ("0 train 5.0\n1 tra", "train", [[0], [5]]),
        ("0 train 5.0\n1 train 41 train 4.0\n\0\0\n2 train 3e\n3 train 2.0\n", "train", [[0, 3], [5, 2]]),
        ("0 train 5.0\n", "norm", [[], []]),
    ],
    ids=["resumed", "build-nanogpt", "skipped", "exponent", "half a value", "half a line", "a crash", "no stream"],
)  # fmt: skip
def test_whole_records_are_read_and_nothing_else(play, tmp_path, text, stream, expected):
    """Half a last line, as a run that goes on leaves it, that breaks the figures or counts as a
    value; steps drawn twice; a stream taken for granted that another program does not write."""
    (tmp_path / "log.txt").write_text(text)
    read_log = play(".", until="def smooth")["read_log"]
    np.testing.assert_array_equal(read_log(tmp_path)[stream], expected)


def test_the_smooth_curve_neither_lags_nor_ends_at_a_nan(play, tmp_path):
    """A trailing mean lies above a falling loss; a running sum is nan for ever after one nan."""
    (tmp_path / "log.txt").touch()
    smooth = play(".", until="runs = reload()")["smooth"]
    ramp = np.arange(1000.0)
    smoothed, n = smooth(ramp)
    assert n == 21 and np.allclose(smoothed[10:-10], ramp[10:-10])
    ramp[500] = np.nan
    ramp[501] = np.inf
    smoothed, _ = smooth(ramp)
    assert np.isfinite(smoothed).all() and np.allclose(smoothed[512:-10], ramp[512:-10])
    assert smooth(np.full(200, np.nan))[0].shape == (200,), "a run that diverged at once"
    assert len(smooth(np.empty(0))[0]) == 0


def test_a_log_of_build_nanogpt_without_a_checkpoint_serves_every_cell(play, tmp_path, capsys):
    """Cells that fail without lr, norm and dt, or before the first checkpoint is saved."""
    write_log(tmp_path / "log", streams=["train"], records="0 hella 0.2463\n20 hella 0.2871\n")
    variables = play("log")
    figures, printed = variables["figures"], capsys.readouterr().out
    assert sorted(figures) == ["compared", "hellaswag", "losses"]
    assert figures["losses"].axes[0].get_ylabel() == "loss, nats per token"
    assert [ax.get_xlabel() for ax in figures["compared"].axes] == ["step"]
    for sentence in ("no `lr`, `norm` and `dt`", "no times", "no checkpoint yet", "is not known"):
        assert sentence in printed
    assert variables["model"].config.n_layer == 4


def test_what_a_run_is_comes_from_its_log_then_from_known_then_from_its_checkpoint(play, tmp_path):
    """Units that are wrong, or missing, until a checkpoint is saved."""
    write_log(tmp_path / "new", records="0 total_batch_size 1000000\n0 vocab_size 257\n")
    write_log(tmp_path / "old")
    write_log(tmp_path / "saved")
    model = train_gpt2.GPT(train_gpt2.GPTConfig(1, 1, 8, 16, 257, "bytes", 256))
    save_model(model, tmp_path / "saved" / "model_00100.pt")
    known = {"old": {"total_batch_size": 500}, "new": {"total_batch_size": 7, "vocab_size": 50257}}
    runs = play("new", "old", "saved", until=SECOND_HALF, known=known)["runs"]
    assert [run.tokens for run in runs[:2]] == [1000000, 500] and np.isnan(runs[2].tokens)
    assert [run.unit for run in runs] == ["byte", "token", "byte"]
    assert [run.name for run in runs] == ["new (bytes)", "old (tokens)", "saved (bytes)"]

    figures = play("new", until=SECOND_HALF)["figures"]
    assert figures["losses"].axes[0].get_ylabel() == "loss, nats per byte"
    assert [ax.get_xlabel() for ax in figures["compared"].axes] == ["million tokens", "minutes"]
    for ax, end in zip(figures["compared"].axes, (99, 99 * 0.1 / 60), strict=True):
        x, _ = curves(ax)["new: train, mean of 3"]
        assert x[-1] == pytest.approx(end), "99 steps of a million tokens, 100 ms each"
    speed = figures["speed"].axes[2]
    assert speed.get_ylabel() == "tokens per second" and speed.lines[0].get_ydata()[0] == 1e7
    speed = play("old", until=SECOND_HALF)["figures"]["speed"].axes[2]
    assert speed.get_ylabel() == "steps per second" and speed.lines[0].get_ydata()[0] == 10


def test_every_figure_tells_several_runs_apart(play, tmp_path):
    """A figure without a legend, or train and val that look the same."""
    for name in ("adamw", "muon"):
        write_log(tmp_path / name, records="0 total_batch_size 5\n0 vocab_size 257\n0 hella 0.25\n")
    figures = play("adamw", "muon", until=SECOND_HALF)["figures"]
    assert list(figures) == FIRST_HALF
    for fig in figures.values():
        assert all(any(name in text for text in legend(fig)) for name in ("adamw", "muon"))
    lines = [line for line in figures["losses"].axes[0].lines if line.get_label()[0] != "_"]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == 4, "two runs, train and val"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_log(tmp_path / folder / "muon")
    runs = play("a/muon", "b/muon", until="def smooth")["reload"]()
    assert [run.name for run in runs] == ["a/muon", "b/muon"]


def test_the_second_panel_shows_the_end_and_hellaswag_its_error(play, tmp_path):
    """An axis that reaches up to the first loss flattens the end, which matters; a difference of
    0.003 between two models looks like progress."""
    write_log(tmp_path / "run", steps=1000, records="0 hella 0.2500\n20 hella 0.3000\n")
    figures = play("run", until=SECOND_HALF)["figures"]
    whole, end = figures["losses"].axes
    assert whole.get_ylim()[1] > 10 and end.get_ylim()[1] - end.get_ylim()[0] < 0.5
    assert end.get_xlim() == pytest.approx((333, 1012), abs=1)
    [bars] = figures["hellaswag"].axes[0].collections
    low, high = bars.get_segments()[1][:, 1]
    assert (high - low) / 2 == pytest.approx(0.0046, abs=1e-4)


def test_skipped_updates_are_marked(play, tmp_path, capsys):
    """Updates that are skipped, again and again, and nobody sees it."""
    write_log(tmp_path / "run", steps=200)
    with open(tmp_path / "run" / "log.txt", "a") as log:
        log.write("50 train nan\n50 norm nan\n70 norm inf\n90 skipped 1\n")
    figures = play("run", until=SECOND_HALF)["figures"]
    x, _ = curves(figures["losses"].axes[0])["run: update skipped"]
    assert x.tolist() == [50, 70, 90] and "run: update skipped" in legend(figures["losses"])
    _, smoothed = curves(figures["losses"].axes[0])["run: train, mean of 5"]
    assert np.isfinite(smoothed).all()
    assert re.search(r"skipped updates +3\n", capsys.readouterr().out)


def test_the_table_has_last_and_best_values_and_the_perplexity(play, tmp_path, capsys):
    """A val loss that was lower before, which the last value alone does not tell."""
    write_log(
        tmp_path / "run", records="90 val 3.0000\n95 val 3.5000\n90 hella 0.31\n95 hella 0.30\n"
    )
    play("run", until=SECOND_HALF)
    printed = capsys.readouterr().out
    assert re.search(r"val loss +3.5000 \(3.0000 at 90\)", printed)
    assert re.search(r"val perplexity +33.1155 \(20.0855 at 90\)", printed)
    assert re.search(r"HellaSwag.* 0.3000 \(0.3100 at 90\)", printed)


def test_a_short_run_beside_a_long_one_is_in_every_panel(play, tmp_path):
    """A run that the legend names and no panel of the end shows."""
    head = "0 total_batch_size 5\n0 vocab_size 257\n"
    write_log(tmp_path / "long", steps=1000, records=head)
    write_log(tmp_path / "short", steps=90, records=head)
    figures = play("long", "short", until=SECOND_HALF)["figures"]
    for ax in (figures["losses"].axes[1], *figures["compared"].axes[:2]):
        left, right = ax.get_xlim()
        for x, y in curves(ax).values():
            assert ((left <= x) & (x <= right)).sum() > 2
            low, high = ax.get_ylim()
            assert low < y[-1] < high


def test_a_damaged_checkpoint_is_passed_over(play, tmp_path, capsys):
    """A traceback, and then one for every cell that uses the model."""
    write_log(tmp_path / "run")
    model = train_gpt2.GPT(train_gpt2.GPTConfig(1, 1, 8, 16, 257, "bytes", 256))
    save_model(model, tmp_path / "run" / "model_00050.pt")
    whole = (tmp_path / "run" / "model_00050.pt").read_bytes()
    (tmp_path / "run" / "model_00100.pt").write_bytes(whole[:1000])
    play("run", until="characters =")
    printed = capsys.readouterr().out
    assert "model_00100.pt cannot be read" in printed and "run, model_00050.pt" in printed


def test_a_cell_run_again_shows_what_the_log_has_gained(play, tmp_path):
    """A run that goes on, for which the kernel would have to be started again."""
    write_log(tmp_path / "run", steps=60)
    variables = play("run", until="axis_names =")
    [cell] = [cell for cell in CODE if '"losses")' in cell.source]
    before = curves(variables["axes"][0])["run: train"][0][-1]
    write_log(tmp_path / "run", steps=90)
    exec(cell.source, variables)
    after = curves(variables["axes"][0])["run: train"][0][-1]
    assert (before, after) == (59, 89)


@pytest.mark.parametrize(
    "text", ["", "0 val 10.9\n", "0 val 10.9\n0 train 10.9\n0 lr 0\n0 norm nan\n0 dt 9\n"]
)
def test_a_run_that_has_just_begun_can_be_drawn(play, tmp_path, text):
    """An empty stream, or one of a single record, in a mean, a limit of an axis or a table."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").write_text(text)
    assert "losses" in play("run", until=SECOND_HALF)["figures"]


def test_the_commands_that_it_names_are_ones_that_the_script_takes():
    """A flag that was renamed: the runs that the notebook draws cannot be made."""
    commands = re.findall(r"^    python train_gpt2.py (.*)", NOTEBOOK.cells[0].source, re.MULTILINE)
    runs = [train_gpt2.parse_args(command.split()).log_dir for command in commands]
    assert f"log_dirs = {runs}".replace("'", '"') in CODE[0].source


def test_figures_are_saved_on_request(play, tmp_path):
    """A figure that cannot be put into a report."""
    write_log(tmp_path / "run", records="0 hella 0.25\n")
    play("run", until=SECOND_HALF, save_to="figures/run")
    saved = sorted(path.name for path in (tmp_path / "figures" / "run").iterdir())
    assert saved == sorted(f"{name}.png" for name in FIRST_HALF)


@pytest.mark.skipif(not (DATA / "tiktoken_cache").is_dir(), reason="needs GPT-2's BPE: shared data")
def test_names_of_gpt2_tokens_do_not_run_together(play, tmp_path, monkeypatch):
    """Tokens of several letters, side by side under the bars, cannot be read."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken_cache"))
    torch.manual_seed(0)
    write_log(tmp_path / "run")
    model = train_gpt2.GPT(train_gpt2.GPTConfig(1, 1, 8, 64))
    save_model(model, tmp_path / "run" / "model_00100.pt")
    fig = play("run", until="def time_per_token")["fig"]
    renderer = fig.canvas.get_renderer()
    fig.canvas.draw()
    boxes = [text.get_window_extent(renderer) for text in fig.axes[0].get_yticklabels()]
    assert len(boxes) == 12
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
