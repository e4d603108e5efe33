"""Each idea of ideas.py is short, trains, resumes exactly, and is never exported wrongly."""

import difflib
import importlib.util
import sys

import ideas
import measure
import numpy as np
import pytest
from conftest import FLAGS, decide, read_log
from test_resume import assert_same_run, break_off

import train_gpt2


def test_each_idea_is_short():
    """None adds or deletes more than 12 lines, blank ones left out, or has more than 3 hunks of
    `diff -u`. `change` requires that each old text occurs once."""
    before = ideas.SCRIPT.splitlines()
    for idea in ideas.IDEAS:
        after = ideas.change(ideas.SCRIPT, idea.edits).splitlines()
        diff = list(difflib.unified_diff(before, after, lineterm=""))[2:]
        marks = [line[0] for line in diff if line[1:].strip()]
        assert 0 < max(marks.count("+"), marks.count("-")) <= 12, idea.name
        assert marks.count("@") <= 3, idea.name


def test_a_difference_is_judged_by_how_much_its_seeds_differ():
    """Three differences of 0.01, 0.02 and 0.03 have a standard error of 0.0058, and t is 4.3."""
    sentence = measure.judge("mine", [0.01, 0.02, 0.03], 1250)
    assert "after 1,250 steps, the loss is 0.0200 nats per token higher" in sentence
    assert "may be noise" in sentence and "below 0.0248" in sentence
    assert "is more than noise" in measure.judge("mine", [-0.02, -0.021, -0.022], 9)
    assert "lower" in measure.judge("mine", [-0.01], 9)
    assert "may be noise" in measure.judge("mine", [-0.01], 9)
    assert "the losses are those of" in measure.judge("mine", [0.0, 0.0], 9)
    assert "not a number" in measure.judge("mine", [0.01, float("nan")], 9)


def call(monkeypatch, *argv):
    """Call measure.py with these arguments."""
    monkeypatch.setattr(sys, "argv", ["measure.py", *map(str, argv)])
    measure.main()


def test_ideas_are_compared_with_the_script(tmp_path, monkeypatch, capsys):
    """Seed by seed, a copy with its own flags. Without GPT-2's runs, --no-base ends at once."""
    started = []  # the flags of all runs

    def fake_run(script, flags, folder, gpu, path):
        """The loss is 2, 0.3 more for a changed script, and 0.01 more for each seed."""
        started.append(flags)
        assert path == (tmp_path if "wsd" in flags else measure.ROOT)
        loss = 2 + 0.01 * int(flags.split()[-1]) + 0.3 * (script != ideas.SCRIPT)
        return {"val": [loss], "dt": [1.0] * 7, "ms": 1.0, "parameters": 5, "log_dir": data}

    monkeypatch.setattr(measure, "run_script", fake_run)
    monkeypatch.setattr(measure, "CURVES", tmp_path / "curves")
    copy = tmp_path / "mine.py"
    copy.write_text(ideas.SCRIPT + "# changed\n")
    data = tmp_path / "data"
    data.mkdir()
    (data / "x_train_0.npy").write_text("some texts")
    argv = ["ideas", "--data", data, "--results", tmp_path, "--beside", copy]
    argv += ["--own=--schedule wsd", "--seeds", 4, 5, 6]
    with pytest.raises(SystemExit, match="no run of this script on these"):
        call(monkeypatch, *argv, "--no-base")
    assert not started
    call(monkeypatch, *argv)
    answer = "mine: after 7 steps, the loss is 0.3000 nats per token higher"
    assert answer in capsys.readouterr().out
    assert len(started) == 6 and sum("--schedule wsd" in flags for flags in started) == 3
    assert len(list((tmp_path / "curves").glob("*/x_train_0.npy"))) == 6
    call(monkeypatch, *argv, "--no-base")
    assert len(started) == 9 and answer in capsys.readouterr().out
    (data / "x_train_0.npy").write_text("more texts")
    with pytest.raises(SystemExit, match="no run of this script on these"):
        call(monkeypatch, *argv, "--no-base")


@pytest.mark.parametrize("gpus, tokens, steps", [(["0"], 65536, 67), ([], 1024, 3)])
def test_a_speed_says_how_long_a_run_takes(gpus, tokens, steps, tmp_path, monkeypatch, capsys):
    """Without a GPU, three steps of one sequence are timed, and B is what the script chooses."""
    started = []

    def fake_run(script, flags, folder, gpu):
        started.append(flags)
        decide(["--device", "cpu", *flags.split()])  # exits if the script does not have them
        return {"B": 1, "ms": 100.0, "s without steps": 9.0}

    monkeypatch.setattr(measure, "run_script", fake_run)
    monkeypatch.setattr(measure, "list_gpus", lambda: gpus)
    flags = ("--results", tmp_path, "--turns", 1, "--tokens", 65536, "--flags=--model d24")
    call(monkeypatch, "speed", *flags)
    out = capsys.readouterr().out
    minutes = 10**10 / tokens / 10 / 60
    assert f"10B tokens would take {minutes:,.0f} minutes" in out
    assert f"--total_batch_size {tokens} --max_steps {steps} --model d24" in started[0]
    assert "batch_size" not in started[0].replace("total_batch_size", "")


def test_shakespeare_is_divided_as_nanogpt_divides_it(tmp_path, monkeypatch, capsys):
    """The last tenth of the text is for validation. Each run is a row with its time and loss."""
    text = tmp_path / "input.txt"
    text.write_text("0123456789" * 100)

    def fake_run(command, cwd):
        assert np.load(cwd + "/text_val_000000.npy").tolist() == list(b"0123456789" * 10)
        decide(command[2:])  # exits if the script does not have the flags
        return 1.5, "val loss: 5.5 | bits\nval loss: 1.25 | bits per byte: 2\n"

    monkeypatch.setattr(measure, "time_command", fake_run)
    call(monkeypatch, "shakespeare", text, "--results", tmp_path, "--steps", 100)
    lines = capsys.readouterr().out.splitlines()
    for line, run in zip(lines, ("muon | 100", "muon | 70", "adamw | 100"), strict=True):
        assert line.startswith(f"| train_gpt2.py | {run} | 0 | 1.5 s | 1.25 nats per byte | ")


def run(script, *flags) -> int:
    """Make a tiny run of an imported script, and return its status."""
    with pytest.raises(SystemExit) as exit_info:
        script.main([str(flag) for flag in [*FLAGS, *flags]])
    return exit_info.value.code or 0


@pytest.mark.parametrize("idea", ideas.IDEAS, ids=lambda idea: idea.name)
def test_each_idea_learns_resumes_and_is_no_false_gpt2(idea, tmp_path, monkeypatch, shards):
    """The interrupted run is the unbroken one, bit for bit. --export_hf refuses the trained model."""
    path, whole, folder = (tmp_path / name for name in ("train_gpt2.py", "whole", "folder"))
    path.write_text(ideas.change(ideas.SCRIPT, idea.edits))
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
    with pytest.raises((SystemExit, RuntimeError), match=r"^2$|load.* state_dict"):
        changed.main(["--init_from", str(whole), "--export_hf", str(folder)])
    assert not folder.exists()
