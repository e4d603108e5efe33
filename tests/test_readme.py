"""README.md: each command works. It and .github: flags exist, and links resolve."""

import importlib.util
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.run
from conftest import FLAGS, ROOT, write_shards

import train_gpt2

README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMES = ("LEARN", "TEXTS", "FULL-RUN", "HELP")  # of the pages that were parts of it
PARTS = "".join((ROOT / ".github" / f"{name}.md").read_text("utf-8") for name in NAMES)
MORE = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob(".github/*.md"))
PAGES = [*ROOT.glob("tests/**/README.md"), *ROOT.glob(".github/*.md")]
SMALL = "--device cpu --val_tokens 640 --max_steps 2 --num_samples 1 --max_new_tokens 4"
# Commands in an order in which they can be run, each with flags that make it small
RUNS = {
    "train_gpt2.py --quickstart": SMALL,
    "train_gpt2.py --resume --log_dir log/quickstart": "",
    "train_gpt2.py --quickstart --resume --max_steps 3000": "--max_steps 4",
    'train_gpt2.py --sample --init_from log/quickstart --prompt "class" --temperature 0.8': "",
    "train_gpt2.py --quickstart --total_batch_size 4096 --batch_size 16 --max_steps 200"
    " --log_dir log/large": SMALL,
    "train_gpt2.py --quickstart --max_steps 50 --log_dir log/check": SMALL,
    "train_gpt2.py --quickstart --max_steps 50 --log_dir log/cpu": SMALL,
    "train_gpt2.py --quickstart --max_steps 100 --val_every 5 --num_samples 0 --log_dir log/count": SMALL,
    "fineweb.py texts --tokenizer 2048 --out mine_2048": "",
    "train_gpt2.py --data_dir mine_2048 --log_dir log/mine_2048"
    ' --prompt="First Citizen:" --quickstart --max_steps 1365 --val_every 137 --val_tokens 38912': SMALL,
    "train_gpt2.py --sample --init_from log/mine_2048 --num_samples 1 --prompt -": "",
    "train_gpt2.py --init_from log/mine_2048 --export_hf folder": "",
    "fineweb.py more --tokenizer mine_2048 --out more_2048": "",
    "train_gpt2.py --quickstart --init_from log/mine_2048 --data_dir more_2048"
    " --log_dir log/more": SMALL,
    "fineweb.py test --tokenizer mine_2048 --val_share 1 --out test_2048": "",
    "train_gpt2.py --data_dir test_2048 --init_from log/mine_2048 --max_steps 0"
    " --val_tokens 1000000000": "",
    'fineweb.py "texts/**/*.txt" --out mine': "",
    'fineweb.py talks.jsonl --text_key "Question: {instruction}\\nAnswer: {output}"'
    " --tokenizer 2048 --out talks": "",
    "tests/benchmarks/questions.py": "",
    'fineweb.py answers.jsonl --text_key "{question}\\n{answer}" --tokenizer pydocs --out answers': "",
    "train_gpt2.py --quickstart --init_from log/quickstart --data_dir answers --log_dir log/answers"
    ' --max_steps 400 --val_every 100 --prompt "What does shutil.copyfile do?"': SMALL,
    "train_gpt2.py --sample --init_from log/answers --num_samples 1 --temperature 0 --prompt -": "",
    "fineweb.py texts --out mine_gpt2": "",
    "train_gpt2.py": f"{SMALL} --model test --seq_len 16 --total_batch_size 256",
    "train_gpt2.py --max_lr 1.8e-3": f"{SMALL} --model test --seq_len 16"
    " --total_batch_size 256 --log_dir log/full",
    "train_gpt2.py --sample --init_from log/quickstart": "",
    "train_gpt2.py --init_from log/quickstart --max_steps 0": "",
    "train_gpt2.py --init_from log/quickstart --export_hf folder": "",
    "mine.py --quickstart --max_steps 50 --log_dir log/try": SMALL,
}
ON_GPU = "--optimizer muon --model d6 --seq_len 256 --total_batch_size 16384 --max_steps"
NOT_RUN = {  # they need a GPU, or download
    "fineweb.py",
    "fineweb.py --max_tokens 150000000 --out edu_small",
    "train_gpt2.py --data_dir edu_small --log_dir log/edu_small --optimizer muon --max_steps 2000",
    "fineweb.py --max_tokens 600000000 --out edu_600M",
    "train_gpt2.py --data_dir edu_600M --log_dir log/edu_600M --optimizer muon --max_steps 4000",
    "train_gpt2.py --sample --init_from gpt2",
    "train_gpt2.py --init_from gpt2 --max_steps 0",
    "hellaswag.py -m gpt2",
    "train_gpt2.py --data_dir edu_small --log_dir /content/drive/MyDrive/gpt2 --optimizer muon"
    " --max_steps 2000 --resume",
    "train_gpt2.py --data_dir edu_small --log_dir log/edu_small --optimizer muon --max_steps 2000"
    " --resume",
    "train_gpt2.py --quickstart --max_steps 50 --log_dir log/mps --device mps",
    "train_gpt2.py --data_dir edu_small --log_dir log/amd --optimizer muon --max_steps 2000"
    " --compile off --dtype float16",
    "train_gpt2.py --data_dir mine_gpt2 --log_dir log/mine_gpt2 --init_from gpt2"
    " --total_batch_size 16384 --max_steps 200 --val_every 21",
    "fineweb.py texts --tokenizer 16384 --out mine_16384",
    f"train_gpt2.py --data_dir mine_16384 --log_dir log/mine_16384 {ON_GPU} 1297 --val_every 130",
    "train_gpt2.py --sample --init_from log/mine_16384 --num_samples 1 --prompt - --temperature 0.7",
}
# Flags, and for each code of a recipe the text behind (>), before (<) or for (=) which it goes
FIELDS = ">or your own, as its name and all its tokens in hex\n"
CHANGES = {
    "the schedule": ("--schedule sqrt", ">SCHEDULES = {\n"),
    "the size": ("--model mini --seq_len 16", ">SIZES = {\n"),
    "a layer": ("", '=return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))'),
    "a layer, by a flag": ("--relu", FIELDS, ">FLAGS = {\n"),
    "the optimizer": ("--optimizer nadam", '<raise UserError(f"--optimizer'),
}
# For each recipe that is a diff, the beginning of its heading and flags
DIFFS = {"Dropout": "--dropout 0.1", "Label": "", "An average": "", "Checkpoints": "--keep 0"}
DIFFS |= {"Weights & Biases": ""}


def test_each_command_is_run_by_a_test_or_known():
    """README and its parts have no command without a test, unless it is known to be untried."""
    pages = README + PARTS
    codes = re.findall(r"`([^`]+)`", re.sub(r"(?s)```.*?```", "", pages))
    blocks = "".join(re.findall(r"(?s)```\w*\n(.*?)```", pages))
    lines = [line.split("#")[0] for line in [*blocks.splitlines(), *codes]]
    pattern = r"(?:python|torchrun\b[^;]*?) ([\w/]+\.py\b[^;&]*)"
    found = {found.strip() for line in lines for found in re.findall(pattern, line)}
    measures = {command for command in found if command.startswith("tests/benchmarks/measure.py")}
    assert found - measures == RUNS.keys() | NOT_RUN


def test_each_flag_exists():
    sources = "".join(p.read_text() for p in [*ROOT.glob("*.py"), *ROOT.glob("tests/*/m*.py")])
    known = {*train_gpt2.FLAGS, *train_gpt2.COMMANDS}
    known |= set(re.findall(r'add\("(?:-\w", ")?--(\w+)"', sources))
    others = "standalone nproc_per_node nnodes max_restarts rdzv_backend rdzv_endpoint rdzv_id"
    others += " local_addr shutdown_timeout nodes ntasks gpus cpus time requeue open signal relu"
    others += " check help index base model_args tasks outfile headless convert find force"
    assert set(re.findall(r"(?<!\w)--(?:no-)?(\w+)", README + MORE)) <= known | {*others.split()}


@pytest.mark.skipif(torch.__version__ < "2.10", reason="its torchrun has no --shutdown_timeout")
def test_torchrun_knows_its_flags():
    """torchrun's parser takes each of its command lines, those of several machines too."""
    lines = re.findall(r"torchrun (--.*?\.py\b[^&\n`]*)", README + MORE)
    assert len(lines) == 10
    for line in lines:
        args = torch.distributed.run.get_args_parser().parse_args(shlex.split(line, comments=True))
        assert args.training_script == "train_gpt2.py"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES])
def test_links_resolve(page):
    """Each file and heading exists. Only GitHub resolves a badge, and only the web an address."""
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if "://" not in link and not re.match(r"[./]+/(actions/|issues$)", link):
            target = page.parent / path if path else page
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M) if anchor else []
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            is_line = re.fullmatch(r"L\d+", anchor)  # see test_the_map
            assert target.exists() and (not anchor or is_line or anchor in slugs), link


def test_the_map_and_the_links_to_lines_are_those_of_the_script():
    """A link's line has the words of the link. The map has a block for 20 lines."""
    lines = (ROOT / "train_gpt2.py").read_text("utf-8").splitlines()
    for words, number in re.findall(r"\[([^]]+)\]\(\.\./train_gpt2\.py#L(\d+)\)", PARTS):
        assert words in lines[int(number) - 1], f"{words} is not in line {number}"
    titles = {i: line[7:].strip(" -") for i, line in enumerate(lines, 1) if line[:6] == "# ----"}
    [end_of_lecture] = [start for start in titles if titles[start] == "generation and evaluation"]
    titles = {start: titles[start] for start in titles if start < end_of_lecture}
    titles[end_of_lecture] = "everything else a run needs"
    starts = [*titles, len(lines)]
    rows = []
    for (start, title), end in zip(titles.items(), starts[1:], strict=True):
        rows.append(f"{start:4}  {title:28}{'█' * round((end - start) / 20)}")
    drawn = re.sub(r"  ←.*", "", README)
    assert "\n".join(rows) in drawn, "\n".join(rows)
    assert f"first {end_of_lecture - 1} lines" in README and f"{len(lines):,} lines" in README


def test_the_code_on_the_first_screen_is_that_of_the_script():
    script = (ROOT / "train_gpt2.py").read_text("utf-8")
    (code,) = re.findall(r"(?s)```python\n(.*?)```", README)
    assert code in script
    [lecture] = re.findall(r"from line (\d+) on", README)
    assert "# ---- generation and evaluation" in script.splitlines()[int(lecture) - 1]


def call(main, argv: list[str], capsys=None):
    """Run a script's main, and require that it succeeds, or skip the test at a download."""
    try:
        main(argv)
    except SystemExit as end:
        if capsys and "tokens cannot be loaded" in capsys.readouterr().err:
            pytest.skip(f"{argv} downloads GPT-2's tokens")
        assert end.code in (0, None), argv


@pytest.mark.slow
def test_each_command_does_its_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once\n"))
    Path("mine.py").write_text(Path(train_gpt2.__file__).read_text())
    write_shards(tmp_path / "edu_fineweb10B")  # instead of the 20 GB
    for folder in ("texts", "more", "test"):
        Path(folder).mkdir()
        Path(folder, "1.txt").write_text("A text of many words. " * 500)
    Path("talks.jsonl").write_text('{"instruction": "Why?", "output": "Because."}\n' * 500)
    for run in RUNS.items():
        script, *argv = shlex.split(" ".join(run))
        if script.startswith("tests/"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
            continue
        call(importlib.import_module(script.removesuffix(".py")).main, argv, capsys)
    assert (
        Path("folder", "model.safetensors").is_file()
        and Path("log/quickstart", "model_00004.pt").is_file()
    )


@pytest.mark.parametrize("row", CHANGES)
def test_each_change_trains_and_resumes(row, tmp_path, monkeypatch, shards):
    """The script has outgrown no recipe."""
    begin = rf"^(?:- )?\*\*{row.capitalize()}\."  # of an item or a paragraph
    (cell,) = re.findall(rf"(?ms){begin}(.*?)(?=\n\n|\n- )", README + MORE)
    codes = [code for code in re.findall(r"`([^`]+)`", cell) if re.search(r"[:=(] ?\S", code)]
    flags, *places = CHANGES[row]
    source = (ROOT / "train_gpt2.py").read_text()
    for code, place in zip(codes, places, strict=False):
        old = place[1:]
        new = {">": f"{old}    {code}\n", "<": f"{code}\n        {old}", "=": code}[place[0]]
        before, after = source.split(old)  # it stands there once
        source = before + new + after
    train_and_resume(source, flags, tmp_path, monkeypatch, shards)


def test_each_diff_has_a_row():
    assert MORE.count("```diff") == len(DIFFS)


@pytest.mark.parametrize("heading", DIFFS)
def test_each_diff_applies_trains_and_resumes(heading, tmp_path, monkeypatch, shards):
    """Each part of a diff, which begins with @@, has lines that stand in the script once."""
    wandb = SimpleNamespace(init=lambda **_: None, log=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    [diff] = re.findall(rf"(?ms)^### {heading}[^\n]*\n(?:[^`#]+\n)?\n```diff\n(.*?)```", MORE)
    source = (ROOT / "train_gpt2.py").read_text()
    for part in re.split(r"(?m)^@@.*\n", diff)[1:]:
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        before, after = source.split(old)
        source = before + new + after
    train_and_resume(source, DIFFS[heading], tmp_path, monkeypatch, shards)


def train_and_resume(source: str, flags: str, tmp_path, monkeypatch, shards):
    """Train two steps with this text of the script, and then two more."""
    (tmp_path / "train_gpt2.py").write_text(source)
    spec = importlib.util.spec_from_file_location("changed", tmp_path / "train_gpt2.py")
    changed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "changed", changed)  # where dataclass looks
    spec.loader.exec_module(changed)
    changed.SIZES["test"] = train_gpt2.SIZES["test"]
    argv = [*FLAGS, *f"--data_dir {shards} --log_dir {tmp_path}/log {flags}".split()]
    call(changed.main, [*argv, "--max_steps", "2"])
    call(changed.main, [*argv, "--max_steps", "4", "--resume"])


def test_tokens_that_are_no_text_train_and_are_drawn(tmp_path, monkeypatch, capsys):
    """The knight of RECIPES: shards of other symbols train, and their tokenizer prints samples."""
    monkeypatch.chdir(tmp_path)
    knight = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "knight.py"))
    knight["main"](games=100)
    [command] = re.findall(r"python train_gpt2.py (.*--data_dir knight .*)", MORE)
    flags = "--max_steps 2 --save_every 0 --num_samples 1 --max_new_tokens 4 --val_tokens 640"
    call(train_gpt2.main, [*shlex.split(command), *flags.split()])
    assert "tokens of knight" in capsys.readouterr().out
