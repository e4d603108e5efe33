"""Each idea of ideas.py is short, trains, resumes exactly, and is never exported wrongly."""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FLAGS, read_log
from test_resume import assert_same_run, break_off

import train_gpt2
from tests.benchmarks import measure, tables


def test_each_idea_is_short():
    """None takes more than 12 lines in 3 places, and all fit together, except that the MLP can be
    replaced only once. `change` requires that each old text occurs once."""
    for idea in tables.IDEAS:
        lines, places = tables.count_changes(tables.change(tables.SCRIPT, idea.edits))
        assert 0 < lines <= 12 and places <= 3, (idea.name, lines, places)
    for left_out in ("ReLU squared", "SwiGLU"):
        edits = [edit for idea in tables.IDEAS if idea.name != left_out for edit in idea.edits]
        compile(tables.change(tables.SCRIPT, edits), left_out, "exec")


def test_a_difference_is_judged_by_how_much_its_seeds_differ():
    """Three differences of 0.01, 0.02 and 0.03 have a standard error of 0.0058, and t is 4.3."""
    sentence = measure.judge("mine", [0.01, 0.02, 0.03], 1250)
    assert "after 1,250 steps, the loss is 0.0200 nats per token higher" in sentence
    assert "may be chance" in sentence and "less than 0.0248" in sentence
    assert "is more than chance" in measure.judge("mine", [-0.02, -0.021, -0.022], 9)
    assert "lower" in measure.judge("mine", [-0.01], 9)
    assert "may be chance" in measure.judge("mine", [-0.01], 9)
    assert "the losses are those of" in measure.judge("mine", [0.0, 0.0], 9)
    assert "not a number" in measure.judge("mine", [0.01, float("nan")], 9)


def test_a_comparison_takes_rows_of_its_own_kind(tmp_path):
    """None of another machine, commit, unit or case. A median leaves out the steps that warm up."""
    results = measure.Results(SimpleNamespace(results=tmp_path, what="ideas"))
    case = {"idea": "GPT-2", "flags": "--model d6", "inputs": "1a"}
    for other in ({}, {"machine": "another"}, {"commit": "another"}):
        results.add(case, 1.0, "nats per token", **other)
    for key in case:
        results.add(case | {key: "another"}, 1.0, "nats per token")
    results.add(case, 1.0, "ms")
    assert len(results.earlier("nats per token", **case)) == 1
    assert measure.median_ms({"dt": [90, 80, 3, 1, 2, 4]}) == 2.5


STARTED = []  # the flags of all runs


class FakeRuns:
    """In place of measure.Runs: the loss of a run is 2, 0.3 more for a changed script, and 0.01 more
    for each seed."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def start(self, script, flags, gpus, PYTHONPATH):
        STARTED.append(flags)
        assert PYTHONPATH.startswith(str(self.copies if "wsd" in flags else measure.ROOT))
        log_dir = Path(tempfile.mkdtemp(dir=self.folder))
        (log_dir / "log.txt").write_text(flags)
        seed = int(flags.split()[-1])
        log = {"val": [2 + 0.01 * seed + 0.3 * (script != tables.SCRIPT)], "dt": [1.0] * 7}
        return SimpleNamespace(log_dir=log_dir, log=log | {"parameters": 5})

    def finish(self, process):
        return process.log


def test_ideas_are_compared_with_the_script(tmp_path, monkeypatch, capsys):
    """Seed by seed, a copy with its own flags. Without GPT-2's runs, --no-base ends at once."""
    monkeypatch.setattr(measure, "Runs", FakeRuns)
    monkeypatch.setattr(measure, "CURVES", tmp_path / "curves")
    copy = tmp_path / "mine.py"
    copy.write_text(tables.SCRIPT + "# changed\n")
    data = tmp_path / "some folder"
    data.mkdir()
    (data / "x_train_0.npy").write_text("some texts")
    FakeRuns.copies = tmp_path
    argv = ["measure.py", "ideas", "--data", str(data), "--results", str(tmp_path)]
    argv += ["--beside", str(copy), "--own=--schedule wsd", "--seeds", "4", "5", "6"]
    monkeypatch.setattr(sys, "argv", [*argv, "--no-base"])
    with pytest.raises(SystemExit, match="no run of this script on these"):
        measure.main()
    assert not STARTED
    monkeypatch.setattr(sys, "argv", argv)
    measure.main()
    answer = "mine: after 7 steps, the loss is 0.3000 nats per token higher"
    assert answer in capsys.readouterr().out
    assert len(STARTED) == 6 and f"--data_dir '{data}'" in STARTED[0]
    assert sum("--schedule wsd" in flags for flags in STARTED) == 3
    assert len(list((tmp_path / "curves").glob("*/log.txt"))) == 6
    monkeypatch.setattr(sys, "argv", [*argv, "--no-base"])
    measure.main()
    assert len(STARTED) == 9 and answer in capsys.readouterr().out
    (data / "x_train_0.npy").write_text("more texts")
    with pytest.raises(SystemExit, match="no run of this script on these"):
        measure.main()


def run(script, *flags) -> int:
    """Make a tiny run of an imported script, and return its status."""
    with pytest.raises(SystemExit) as exit_info:
        script.main([str(flag) for flag in [*FLAGS, *flags]])
    return exit_info.value.code or 0


@pytest.mark.parametrize("idea", tables.ENTRIES, ids=lambda idea: idea.name)
def test_each_idea_learns_resumes_and_is_no_false_gpt2(idea, tmp_path, monkeypatch, shards):
    """The interrupted run is the unbroken one, bit for bit. --export_hf refuses the trained model."""
    path, whole, folder = (tmp_path / name for name in ("train_gpt2.py", "whole", "folder"))
    path.write_text(tables.change(tables.SCRIPT, idea.edits))
    spec = importlib.util.spec_from_file_location("changed", path)
    changed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "changed", changed)  # where dataclass looks
    spec.loader.exec_module(changed)
    changed.SIZES["test"] = train_gpt2.SIZES["test"]
    flags = ["--data_dir", shards, "--optimizer", "muon", "--max_steps", 6, "--save_every", 3]
    assert run(changed, *flags, "--log_dir", whole) == 0
    assert read_log(whole)["val"][6] < read_log(whole)["val"][0] - 1
    broken = break_off(whole, tmp_path / "broken", 3)
    assert run(changed, *flags, "--log_dir", broken, "--resume") == 0
    assert_same_run(whole, broken)
    assert run(changed, "--init_from", whole, "--export_hf", folder) == 2 and not folder.exists()


def test_memory_is_limited_in_a_changed_copy_of_the_script(tmp_path, monkeypatch):
    """A run of `measure.py memory` has a limit, and the script counts this memory as free."""
    scripts = []

    def fake_run(self, script, flags):
        compile(script, "limited", "exec")
        scripts.append(script)
        return {"B": 4, "dt": [1.0] * 3, "GiB": 7.5}

    monkeypatch.setattr(measure.Runs, "run", fake_run)
    gpu = SimpleNamespace(total_memory=64 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    argv = ["measure.py", "memory", "--models", "d12", "--limits", "16"]
    monkeypatch.setattr(sys, "argv", [*argv, "--results", str(tmp_path)])
    measure.main()
    assert len(scripts) == 4  # the chosen B and the largest, without and with --recompute
    assert "memory_fraction(0.25)\n" in scripts[0] and "0.9 * 16 * 2**30" in scripts[0]
