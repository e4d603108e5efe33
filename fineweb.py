"""Turn documents into shards of tokens for train_gpt2.py: exact, on every core, safe to interrupt.

python fineweb.py                                       # FineWeb-Edu, 10B tokens: edu_fineweb10B/
python fineweb.py --name sample-100BT                   # 100B tokens: edu_fineweb100B/
python fineweb.py --files 'texts/*.jsonl' --out mine    # .jsonl, .txt (.gz, .xz, .zst), .parquet
python fineweb.py --dataset pydocs                      # Python's own documentation, offline
python fineweb.py --part 3/128 --out big                # a slice of the files; when all are done:
python fineweb.py --merge --out big                     # make the slices one dataset
python fineweb.py --verify --out big                    # re-read every shard

A shard is a 1-D array of uint16 tokens; each document in it is its <|endoftext|> token followed by
its text's tokens. The shards depend on the documents and the options alone, never on the number of
workers or on interruptions: killed at any moment and started again, it goes on where it was.

From top to bottom: sources read documents; long ones are cut where the tokenizer cannot notice;
workers encode; one writer fills the shards of both splits. meta.json, beside the shards, is all the
state there is: each finished shard with its sha256, and the document at which to go on.
"""

import argparse
import ast
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import queue
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import tiktoken

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
DATASETS = {  # how the names of its shards begin, and its default folder
    FINEWEB_EDU: ("edufineweb", "edu_fineweb"),
    "HuggingFaceFW/fineweb": ("fineweb", "fineweb"),
    "pydocs": ("pydocs", "pydocs"),
}
OPTIONS = ("text_key", "shard_size", "val_tokens", "val_share", "max_tokens", "format", "streaming")
CHARS_PER_TOKEN = {"gpt2": 4.5, "bytes": 1.0}  # of English, to estimate with
TABLE_ROWS = 256  # rows of a table read at once: ~1 MB of FineWeb
SEGMENT_CHARS = 2**17  # longer documents are encoded in segments of about this many characters
PIECE = 2**13  # tokens: a document longer than this is dealt to train and val in pieces of as many
BATCH_CHARS = 2**19  # characters sent to a worker at once: ~0.05 s of its time

# a document: its row in its file, its text in blocks (a file larger than memory can be a document)
Document = tuple[int, Iterable[str]]
# a source: its files' names; a function from a file's number and a row to the documents from there
# on; what changes when the data does; about how many characters there are, None if nobody knows
Source = tuple[list[str], Callable[[int, int], Iterator[Document]], object, float | None]
# what is encoded: [file, row] of the document that begins here, None where one goes on; its text
Segment = tuple[list[int] | None, str]


# --------------------------------------------------------------------------------------------------
# what the three scripts share


class UserError(ValueError):
    """A mistake that the user can put right.

    The command lines print its message as one line and exit with status 2. The message says what
    was found, what was expected, and what to run. Every other exception is a traceback.
    """


def require(condition: bool, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def refuse_arguments(message: str) -> NoReturn:
    """Raise UserError for what argparse finds wrong. A parser takes this as its `error` method."""
    raise UserError(f"{message}; --help lists the flags")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file for writing that appears under its name only once it is whole.

    The bytes go to a temporary file, which is flushed to the disk and then renamed, so that a
    reader finds the old file or the new one and never a part. Where writing fails, the temporary
    file is removed and the old file stays.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, str(path))
    finally:
        with suppress(FileNotFoundError):  # it has been renamed
            os.remove(temporary)


# --------------------------------------------------------------------------------------------------
# tokenizers


@functools.cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the tokenizer: "gpt2", or "bytes" (a token is a byte, <|endoftext|> is 256).

    Raises ValueError for any other name.
    """
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            hint = "TIKTOKEN_CACHE_DIR can name a folder that another machine's tiktoken filled"
            raise ConnectionError(f"GPT-2's vocabulary cannot be downloaded: {hint}") from error
    if name != "bytes":
        raise ValueError(f"unknown tokenizer {name!r}: expected gpt2 or bytes")
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s).{1,64}",  # nothing merges, so any pieces will do; short ones are fastest
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )


def encode(batch: list[Segment], tokenizer: str) -> list[tuple[list[int] | None, np.ndarray]]:
    """Encode each segment's text to uint16 tokens. This is what the workers do."""
    enc, encoded = get_tokenizer(tokenizer), []
    for position, text in batch:
        # half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes U+FFFD
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # nothing is special: the characters "<|endoftext|>" in a document are text, not the token
        tokens = enc.encode_to_numpy(text, disallowed_special=())
        head = [] if position is None else [enc.eot_token]
        tokens = np.concatenate([head, tokens], dtype=np.uint16, casting="unsafe")
        encoded.append((position, tokens))
    return encoded


# --------------------------------------------------------------------------------------------------
# sources


def open_files(args: argparse.Namespace) -> Source:
    """Open local files, in the order of their names."""
    paths = sorted({path for pattern in args.files for path in glob.glob(pattern, recursive=True)})
    if not paths:
        raise ValueError(f"--files {' '.join(args.files)}: there are no such files")
    for path in paths:
        if os.path.isdir(path):
            raise ValueError(
                f"--files {path} is a folder: --files '{path}/*.txt' for what is in it"
            )
        if not re.search(r"\.(parquet|(jsonl|txt)(\.(gz|xz|zst))?)$", path):
            raise ValueError(f"{path}: expected .jsonl, .txt (also .gz, .xz, .zst) or .parquet")
    sizes = {path: os.path.getsize(path) for path in paths}
    # compressed English is about 2.7 times longer than its file
    chars = sum(sizes[path] * (1 if path.endswith(("jsonl", "txt")) else 2.7) for path in paths)
    identity = [[os.path.basename(path) for path in paths], list(sizes.values())]
    return paths, lambda k, first: read_file(paths[k], args.text_key, first), identity, chars


def read_file(path: str, text_key: str, first: int) -> Iterator[Document]:
    """Yield a file's documents from row `first` on.

    A row is a row of .parquet or a line of .jsonl (those of white space are skipped); a .txt file
    is one document.
    """
    if path.endswith(".parquet"):
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            columns = [text_key] if text_key in file.schema_arrow.names else None
            yield from read_tables(file.iter_batches(TABLE_ROWS, columns=columns), text_key, first)
        return
    with open_text(path) as file:
        if ".jsonl" not in os.path.basename(path):
            yield 0, iter(lambda: file.read(2**20), "")  # characters
            return
        for row, line in enumerate(file):
            if row >= first and not line.isspace():
                where = f"line {row + 1}"
                yield row, [get_text(parse_json(line, where), text_key, where)]


def open_text(path: str) -> io.TextIOWrapper:
    """Open a UTF-8 file, compressed or not."""
    if path.endswith(".zst"):
        import pyarrow  # its stream notices a truncated file, zstandard's does not

        file = pyarrow.input_stream(path, compression="zstd")
    else:
        opener = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], open)
        file = opener(path, "rb")
    return io.TextIOWrapper(file, "utf-8-sig", newline="\n")  # line ends stay as they are


def read_tables(tables: Iterable, text_key: str, first: int) -> Iterator[Document]:
    """Yield the documents, one a row, of Arrow tables that follow each other, from `first` on."""
    row = 0
    for table in tables:
        if row + len(table) > first:
            if text_key in table.schema.names:
                table = table.select([text_key])
            for r, record in enumerate(table.to_pylist(), row):
                if r >= first:
                    yield r, [get_text(record, text_key, f"row {r + 1}")]
        row += len(table)


def get_text(record: object, text_key: str, where: str) -> str:
    """Return the record's text. Raises ValueError saying what is there instead."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with keys, found {record!r:.40}")
    if text_key not in record:
        keys = ", ".join(record)
        raise ValueError(f"{where}: no key {text_key!r} but {keys}: choose by --text_key")
    if not isinstance(record[text_key], str):
        raise ValueError(f"{where}: expected text, found {text_key!r}: {record[text_key]!r:.40}")
    return record[text_key]


def parse_json(text: str, where: str) -> object:
    """Parse JSON. Raises ValueError naming the place."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def open_hub(args: argparse.Namespace) -> Source:
    """Open a dataset of the Hugging Face hub, or a local folder of data files, through datasets."""
    import datasets

    datasets.config.TORCH_AVAILABLE = False  # or a stream imports torch: seconds, for nothing
    try:
        builder = datasets.load_dataset_builder(args.dataset, args.name)
    except ConnectionError as error:
        raise ConnectionError(
            f"{error}. No network? HF_ENDPOINT can name a mirror, HF_HOME a folder with the data in"
            " it; or tokenise files that you have: --files 'folder/*.parquet' --out folder"
        ) from error
    if "train" not in (builder.config.data_files or {}):
        raise ValueError(f"{args.dataset} has no data files for a split named train")
    files = builder.config.data_files["train"]
    names = list(files) if args.streaming else [args.dataset]  # a copy counts as one file

    @functools.cache
    def load() -> datasets.IterableDataset:
        if args.streaming:
            return builder.as_streaming_dataset(split="train")
        builder.download_and_prepare()
        return builder.as_dataset(split="train").to_iterable_dataset()

    def read(k: int, first: int) -> Iterator[Document]:
        rows = load().with_format("arrow").shard(len(names), k)
        return read_tables(rows.iter(batch_size=TABLE_ROWS), args.text_key, first)

    billions = re.fullmatch(r"sample-(\d+)BT", args.name or "")  # of GPT-2's tokens
    train = (builder.info.splits or {}).get("train")
    chars = (
        int(billions[1]) * 1e9 * CHARS_PER_TOKEN["gpt2"] if billions else train and train.num_bytes
    )
    return names, read, [list(files), files.origin_metadata], chars  # with commit or times


def open_pydocs(args: argparse.Namespace) -> Source:
    """Open Python's reference and its library's docstrings: 2 MB that every Python carries."""
    from pydoc_data.topics import topics

    # neither tests nor tables nor whole applications
    skip = r"tests?|.*_tests?|(site|dist)-packages|idlelib|lib2to3|turtledemo|encodings|pydoc_data"
    paths = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if not re.fullmatch(skip, name)]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(paths):
        with open(path, "rb") as file:
            tree = ast.parse(file.read())  # nothing is imported
        texts.append("\n\n".join(find_docstrings(tree, os.path.basename(path)[: -len(".py")])))
    texts = [text for text in clean(texts) if len(text) > 200]  # characters: less says nothing
    documents = [(row, [text]) for row, text in enumerate(texts)]
    return ["pydocs"], lambda _, first: iter(documents[first:]), texts, sum(map(len, texts))


def find_docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, each after its dotted name."""
    if text := ast.get_docstring(node):
        yield f"{name}: {text}"
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from find_docstrings(child, f"{name}.{child.name}")


def clean(texts: Iterable[str]) -> Iterator[str]:
    """Straighten quotes, and drop the paragraphs that were there already.

    The topics quote each other at length: a model must not be validated on what it was trained on.
    """
    seen = set()
    for text in texts:
        text = text.translate(str.maketrans("‘’“”–\t", "''\"\"- "))
        paragraphs = [p.rstrip() for p in re.split(r"\n\s*\n", text.strip("\n"))]
        new = []
        for paragraph in paragraphs:
            if len(paragraph) < 60 or paragraph not in seen:  # characters
                new.append(paragraph)
            seen.add(paragraph)
        yield "\n\n".join(new) + "\n"


# --------------------------------------------------------------------------------------------------
# from documents to tokens


def open_source(args: argparse.Namespace) -> tuple[Callable, str, float | None]:
    """Open what the command line asks for.

    Returns a function from a position, [file, row], to the segments from there on, a fingerprint of
    the data, and about how many characters there are, None if nobody knows. Raises ValueError where
    the source is not to be had; so does reading, naming the file, or ConnectionError.
    """
    opener = open_files if args.files else open_pydocs if args.dataset == "pydocs" else open_hub
    names, read, identity, chars = opener(args)
    if args.parts > len(names):
        raise ValueError(f"--part: {args.parts} parts need as many files, found {len(names)}")

    def read_segments(position: list[int] | None) -> Iterator[Segment]:
        first_file, first_row = position or (args.part, 0)
        for k in range(first_file, len(names), args.parts):
            try:
                for row, blocks in read(k, first_row if k == first_file else 0):
                    begins = [k, row]
                    for text in split_text(blocks):
                        yield begins, text
                        begins = None
            except Exception as error:  # formats, compressions and networks have their own
                kind = ValueError if args.files or type(error) is ValueError else ConnectionError
                raise kind(f"{names[k]}: {error}") from error

    fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return read_segments, fingerprint, chars and chars / args.parts


# GPT-2's pattern begins a piece at the first and at the last white-space character of every run,
# whatever is around it. Cut there, and the tokens of the segments are the tokens of the whole.
CUT = r"(?:(?<=\S)(?=[ \t\r\n])|(?=[ \t\r\n]\S))"
NEXT_CUT, LAST_CUT = re.compile(CUT), re.compile(f"(?s:.+){CUT}")


def split_text(blocks: Iterable[str], chars: int = SEGMENT_CHARS) -> Iterator[str]:
    """Cut a document into segments that encode to the same tokens as the whole.

    So no memory grows with a document, all workers share in it, and a megabyte of blanks does not
    overflow the tokenizer's stack. An empty document is one empty segment.
    """
    text = ""
    for block in blocks:
        text, start = text + block, 0
        while len(text) > start + chars + 1:  # a cut looks one character ahead
            end = start + chars
            cut = LAST_CUT.match(text, start, end) or NEXT_CUT.search(text, end)
            if cut is None:
                break
            yield text[start : cut.end()]
            start = cut.end()
        text = text[start:]
    yield text


def make_batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Group segments to equal amounts of work."""
    batch, chars = [], 0
    for position, text in segments:
        batch.append((position, text))
        chars += len(text) + 100  # an empty document is some work too
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def tokenize(batches: Iterable[list[Segment]], tokenizer: str, workers: int) -> Iterator[list]:
    """Encode the batches, in order, on so many processes."""
    if workers == 1:
        yield from (encode(batch, tokenizer) for batch in batches)
        return
    pipes = start_workers(workers, tokenizer)
    ahead = 4 * workers  # batches: nobody waits for the next one, while a shard is synced too
    for k, batch in enumerate(itertools.chain(batches, [None] * ahead)):  # None: no more
        pipe, encoded = pipes[k % workers], None  # in turns
        try:
            if k >= ahead:
                encoded = pipe.recv()
            if batch:
                pipe.send(batch)
        except (EOFError, OSError) as error:
            raise ChildProcessError("a worker was killed, for lack of memory perhaps") from error
        if encoded:
            yield encoded


def start_workers(workers: int, tokenizer: str) -> list:
    """Start processes; return a pipe to each."""
    from multiprocessing import get_context

    spawn, pipes = get_context("spawn"), []  # not forked: sources have threads
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is the parent's
    for _ in range(workers):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(theirs, tokenizer), daemon=True).start()
        theirs.close()  # the worker alone has it: either notices when the other is killed
        pipes.append(ours)
    signal.signal(signal.SIGINT, previous)
    return pipes


def work(pipe, tokenizer: str) -> None:
    """Encode the batches that come through a pipe, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows nothing is inherited
    inbox = queue.SimpleQueue()

    def receive() -> None:  # at any time, or both ends could wait until the other one reads
        with suppress(EOFError, OSError):
            while True:
                inbox.put(pipe.recv())
        inbox.put(None)

    threading.Thread(target=receive, daemon=True).start()
    with suppress(OSError):
        while batch := inbox.get():
            pipe.send(encode(batch, tokenizer))


# --------------------------------------------------------------------------------------------------
# from tokens to shards


def make_header(tokens: int, suffix: str) -> bytes:
    """Return a shard's header: numpy's, of one length for any count, or llm.c's."""
    if suffix == "bin":
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, tokens  # magic, version, count
        return header.tobytes()
    buffer = io.BytesIO()
    fields = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


class ShardWriter:
    """Appends tokens to the open shard of each split, and keeps meta.json in step with the disk.

    meta["progress"] is a snapshot of the moment when the last shard was finished: the `position` of
    the document in work and how many of its tokens were `written`; the `split` of the piece in work
    and how many tokens are `left` in it; `documents` and `tokens` so far; and the `open` shards,
    whose .tmp files have at least the tokens named there. From it a killed run continues as if it
    had not been.
    """

    def __init__(self, args: argparse.Namespace, meta: dict) -> None:
        self.args, self.meta, self.progress = args, meta, meta["progress"]
        self.count = self.progress["tokens"]  # {"val": tokens, "train": tokens}
        self.files = {s: self.reopen(*shard) for s, shard in self.progress["open"].items()}

    def reopen(self, name: str, tokens: int) -> io.BufferedRandom:
        """Open a shard, under its temporary name, after so many of its tokens."""
        path, size = os.path.join(self.args.out, name + ".tmp"), self.measure(tokens)
        if tokens and (not os.path.exists(path) or os.path.getsize(path) < size):
            raise ValueError(f"{path} is missing or cut short: begin anew with --overwrite")
        file = open(path, "r+b" if tokens else "w+b")  # noqa: SIM115
        file.seek(file.truncate(size))  # a new one is as long as its header, which comes last
        return file

    def measure(self, tokens: int) -> int:
        """Return the size in bytes of a shard of so many tokens."""
        return len(make_header(tokens, self.args.format)) + 2 * tokens  # uint16: 2 bytes a token

    def append(self, split: str, tokens: np.ndarray) -> None:
        """Append tokens, for which there is room, to the split's shard."""
        if split not in self.files:
            index = len(self.meta["shards"]) + len(self.files)
            name = f"{self.args.prefix}_{split}_{index:06d}.{self.args.format}"
            self.files[split], self.progress["open"][split] = self.reopen(name, 0), [name, 0]
        self.files[split].write(tokens.astype("<u2", copy=False).data)
        self.progress["open"][split][1] += len(tokens)
        self.count[split] += len(tokens)

    def begin_piece(self) -> None:
        """Choose the split of the next piece: val while that has no more than its share.

        A piece is a document, or PIECE tokens of a longer one; less where all before is not much,
        so that val has about its share of a corpus of any size.
        """
        args, total = self.args, sum(self.count.values())
        wanted = args.part == 0 and self.count["val"] < args.val_tokens and args.val_share > 0
        behind = self.count["val"] <= args.val_share * total
        self.progress["split"] = "val" if wanted and behind else "train"
        self.progress["left"] = min(PIECE, max(16, total // 32))

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens of the document in work; a full shard is finished when more is to come."""
        while len(tokens):
            if self.progress["left"] == 0:
                self.begin_piece()
            split = self.progress["split"]
            room = self.args.shard_size - self.progress["open"].get(split, ["", 0])[1]
            if split == "val":
                room = min(room, self.args.val_tokens - self.count["val"])
            if room == 0:
                if self.count["val"] == self.args.val_tokens:
                    self.progress["split"] = "train"  # in the middle of a document, if need be
                self.finish(split)
                continue
            new = tokens[: min(room, self.progress["left"])]
            self.append(split, new)
            self.progress["written"] += len(new)
            self.progress["left"] -= len(new)
            tokens = tokens[len(new) :]

    def finish(self, split: str) -> None:
        """Make the split's shard final: its bytes on the disk, its line in meta.json, its name.

        In this order, nothing has a final name before it is whole and listed; what a kill leaves
        between the last two steps, the next start renames.
        """
        name, tokens = self.progress["open"].pop(split)
        path, file = os.path.join(self.args.out, name), self.files.pop(split)
        file.seek(0)
        file.write(make_header(tokens, self.args.format))
        for unsynced in (file, *self.files.values()):
            unsynced.flush()
            os.fsync(unsynced.fileno())
        file.close()
        self.meta["shards"][name] = {"tokens": tokens, "sha256": hash_file(path + ".tmp")}
        save_meta(self.args.meta_path, self.meta)
        rename(path + ".tmp", path)

    def finish_all(self) -> None:
        """Finish the last shards. A corpus that ended within validation gives a tenth of itself."""
        if self.count["train"] == 0 and self.count["val"] > 1 and not self.meta["shards"]:
            kept, file = max(1, self.count["val"] // 10), self.files["val"]
            file.seek(self.measure(kept))
            rest = np.frombuffer(file.read(), dtype="<u2")
            file.truncate(self.measure(kept))
            self.count["val"] = self.progress["open"]["val"][1] = kept
            self.append("train", rest)
        if self.count["train"] == 0:
            found = f"{self.meta['source']}: {self.count['val']:,} tokens in all, none to train on"
            raise ValueError(f"{found}: take more documents, or lower --val_tokens")
        for split in list(self.files):
            self.finish(split)
        self.progress.update(position=None, done=True)
        save_meta(self.args.meta_path, self.meta)

    def close(self) -> None:
        """Close what an error left open."""
        for file in self.files.values():
            with suppress(OSError):  # a full disk, which is being reported already
                file.close()


def fill_shards(writer: ShardWriter, batches: Iterable[list]) -> Iterator[int]:
    """Write batches of (position, tokens) to both splits; yield the tokens in all after each."""
    args, progress, count = writer.args, writer.progress, writer.count
    on_disk = progress["written"]  # tokens that an earlier run wrote of the document in work
    for batch in batches:
        for position, tokens in batch:
            total = count["val"] + count["train"]
            if total == args.max_tokens:
                return
            if position not in (None, progress["position"]):
                progress.update(position=position, written=0, left=0)
                progress["documents"] += 1
            new, on_disk = tokens[on_disk:], max(0, on_disk - len(tokens))
            writer.write(new[: args.max_tokens and args.max_tokens - total])
        yield count["val"] + count["train"]


# --------------------------------------------------------------------------------------------------
# the folder


def hash_file(path: str) -> str:
    """Return a file's sha256 in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def rename(old: str, new: str) -> None:
    """Rename a file for good: the folder is on the disk too when this returns."""
    os.replace(old, new)
    if os.name == "posix":  # Windows does not open folders
        folder = os.open(os.path.dirname(os.path.abspath(new)), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def save_meta(path: str, meta: dict) -> None:
    """Write a meta.json, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(meta, indent=1).encode())


def load_metas(folder: str) -> tuple[dict[str, dict], dict[str, dict], list[str]]:
    """Load what there is in a folder.

    Returns its meta.json and those of parts, by path; the shards that they list, by name; and the
    names of other shards, which no meta.json lists. Raises ValueError for another program's.
    """
    metas = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "meta*.json"))):
        with open(path, encoding="utf-8") as file:
            metas[path] = parse_json(file.read(), path)
        if "options" not in metas[path]:
            raise ValueError(f"{path} was not written by fineweb.py: choose another --out")
    shards = {name: shard for meta in metas.values() for name, shard in meta["shards"].items()}
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    read = re.compile(r".*(train|val).*\.(npy|bin)")  # what the trainer would read
    return metas, shards, [name for name in names if read.fullmatch(name) and name not in shards]


def find_meta(args: argparse.Namespace) -> dict:
    """Return this run's meta.json as an earlier run left it, or a new one.

    Raises ValueError where the folder holds what is neither this run's nor a sister part's.
    """
    enc = get_tokenizer(args.tokenizer)
    progress = {"position": None, "written": 0, "split": None, "left": 0, "documents": 0}
    new = {
        "tokenizer": args.tokenizer,
        "vocab_size": enc.n_vocab,
        "eot": enc.eot_token,
        "source": " ".join(args.files or filter(None, [args.dataset, args.name])),
        "options": {name: getattr(args, name) for name in (*OPTIONS, "parts", "part")},
        "shards": {},
        "progress": progress | {"tokens": {"val": 0, "train": 0}, "open": {}, "done": False},
    }
    metas, _, unlisted = load_metas(args.out)
    for path, meta in metas.items():
        if path != args.meta_path or not args.overwrite:
            check_same_run(path, meta, new, "choose another --out, or begin anew with --overwrite")
    if unlisted:
        found = f"{args.out} holds {unlisted[0]}, which is not of this run"
        raise ValueError(f"{found}: delete it, or choose another --out")
    return new if args.overwrite else metas.get(args.meta_path, new)


def check_same_run(path: str, found: dict, wanted: dict, hint: str) -> None:
    """Raise ValueError naming the first difference between two runs that share a folder."""
    found, wanted = found | found["options"], wanted | wanted["options"]
    for key in ("tokenizer", "source", "parts", *OPTIONS):
        if found[key] != wanted[key]:
            raise ValueError(f"{path} has {key} {found[key]}, this run {wanted[key]}: {hint}")


def prepare_folder(args: argparse.Namespace, data: str) -> dict:
    """Return the run's meta.json, with the folder as that says.

    Raises ValueError where `data`, the fingerprint, is not that of the earlier run.
    """
    if args.overwrite:
        shards = load_metas(args.out)[0].get(args.meta_path, {"shards": {}})["shards"]
        halves = glob.glob(os.path.join(glob.escape(args.out), f"{args.prefix}_*.tmp"))
        for path in [*(os.path.join(args.out, name) for name in shards), *halves, args.meta_path]:
            if os.path.exists(path):
                os.remove(path)
    meta = find_meta(args)
    if meta.setdefault("data", data) != data:
        changed = f"{meta['source']} changed since this run began"
        raise ValueError(f"{changed}: begin anew with --overwrite")
    for path in (os.path.join(args.out, name) for name in meta["shards"]):
        if os.path.exists(path + ".tmp"):  # listed, but not renamed yet
            rename(path + ".tmp", path)
    return meta


def lock(args: argparse.Namespace) -> io.TextIOWrapper:
    """Hold this run until the file is closed. Raises ValueError where another process does."""
    file = open(args.meta_path + ".lock", "w")  # noqa: SIM115
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is at work on {args.meta_path}") from error
    return file


def verify(args: argparse.Namespace) -> None:
    """Re-read every shard of a folder. Raises ValueError saying all that is wrong."""
    metas, shards, unlisted = load_metas(args.out)
    if not metas:
        raise ValueError(f"{args.out} has no meta.json to verify it by")
    wrong = [f"{path} is not finished" for path in metas if not metas[path]["progress"]["done"]]
    wrong += [f"{name} is in no meta.json" for name in unlisted]
    for name in sorted(shards):
        path = os.path.join(args.out, name)
        if not os.path.exists(path):
            wrong.append(f"{name} is missing")
        elif hash_file(path) != shards[name]["sha256"]:
            wrong.append(f"{name} is damaged (sha256)")
    if wrong:
        raise ValueError(f"{args.out}: " + ", ".join(wrong))
    tokens = sum(shard["tokens"] for shard in shards.values())
    print(f"{args.out}: {len(shards)} shards, {tokens:,} tokens, all as meta.json says")


def merge(args: argparse.Namespace) -> None:
    """List all parts' shards in one meta.json. Raises ValueError where a part is not finished."""
    metas, shards, _ = load_metas(args.out)
    metas.pop(args.meta_path, None)  # an earlier merge's, or that of a run without parts
    if not metas:
        raise ValueError(f"{args.out} has no parts to merge: --part 1/4 makes the first of four")
    first = next(iter(metas.values()))
    for path, meta in metas.items():
        check_same_run(path, meta, first, "not parts of one dataset")
    done = {meta["options"]["part"] for meta in metas.values() if meta["progress"]["done"]}
    parts = first["options"]["parts"]
    if missing := [f"{part + 1}/{parts}" for part in range(parts) if part not in done]:
        raise ValueError(f"{args.out}: --part {', '.join(missing)} to be finished first")
    save_meta(args.meta_path, first | {"shards": shards, "progress": {"done": True}})
    print(f"{args.out}: {parts} parts, {len(shards)} shards in one meta.json")


# --------------------------------------------------------------------------------------------------
# command line


def build(args: argparse.Namespace) -> None:
    """Write the shards that the command line asks for, from where an earlier run stopped."""
    rate, meta = "", find_meta(args)
    if not meta["progress"]["done"]:
        read, data, chars = open_source(args)
        os.makedirs(args.out, exist_ok=True)
        with lock(args):
            meta = prepare_folder(args, data)  # read again: no other process can change it now
            if meta["progress"]["done"]:
                raise ValueError(f"another process has just finished {args.meta_path}")
            batches = make_batches(read(meta["progress"]["position"]))
            encoded = tokenize(batches, args.tokenizer, args.workers)
            writer = ShardWriter(args, meta)
            try:
                expected = announce(args, meta, chars)
                rate = show_progress(writer, fill_shards(writer, encoded), expected)
                writer.finish_all()
            finally:
                encoded.close()
                writer.close()
        os.remove(args.meta_path + ".lock")
    for split, tokens in meta["progress"]["tokens"].items():
        shards = [name for name in meta["shards"] if f"_{split}_" in name]
        print(f"{split:5} {tokens:,} tokens in {len(shards)} shards")
    print(f"{meta['progress']['documents']:,} documents{rate}")


def suggest(folder: str) -> str:
    """Return the next command: train_gpt2.py's defaults are for 10B tokens, not for a book."""
    metas, shards, _ = load_metas(folder)
    tokens = {"train": 0, "val": 0}
    for name, shard in shards.items():
        tokens["train" if "_train_" in name else "val"] += shard["tokens"]
    if tokens["train"] < 2000:
        return f"{tokens['train']:,} tokens teach nothing: more text is needed"
    flags = f"--data_dir {shlex.quote(folder)}"
    log_dir = shlex.quote(os.path.join("log", os.path.basename(os.path.abspath(folder))))
    if all(meta["tokenizer"] == "bytes" for meta in metas.values()):
        flags = f'--quickstart {flags} --log_dir {log_dir} --prompt "The "'
    elif tokens["train"] < 10**8:
        flags += " --model d6 --seq_len 256 --total_batch_size 16384 --epochs 4"
        flags += f" --log_dir {log_dir}"
    return f"next: python train_gpt2.py {flags}{'' if tokens['val'] else ' --val_every 0'}"


def announce(args: argparse.Namespace, meta: dict, chars: float | None) -> int | None:
    """Say what disk and time the run takes; return its tokens, about, None if nobody knows.

    Raises ValueError where the disk has not the room.
    """
    tokens = [args.max_tokens, chars and int(chars / CHARS_PER_TOKEN[args.tokenizer])]
    expected = min(filter(None, tokens), default=None)
    rest = max(0, (expected or 0) - sum(meta["progress"]["tokens"].values()))
    minutes = rest / (2.5e6 * args.workers) / 60  # ~2.5M tokens/s a core of GPT-2's BPE
    size = f"about {rest:,} tokens if English"
    if rest > 1e6:  # uint16: 2 bytes a token
        size = f"about {rest / 1e6:,.1f}M tokens if English, {2 * rest / 1e6:,.1f} MB of disk"
    size += "" if args.streaming else " besides the copy in HF_HOME"
    size += f", {minutes:.0f} minutes if the source keeps up" if minutes > 1 else ""
    print(f"{meta['source']}: {size if expected else 'of unknown size, 2 bytes of disk a token'}")
    if (free := shutil.disk_usage(args.out).free) < 2 * rest:
        hint = "make room, choose another --out, or take less with --max_tokens"
        raise ValueError(f"{args.out} has {free / 1e9:.2f} GB free: {hint}")
    return expected


def show_progress(writer: ShardWriter, totals: Iterator[int], expected: int | None) -> str:
    """Run the writer behind two progress bars, and return its steady rate in words."""
    from tqdm import tqdm

    # disable=None: bars on a terminal only; a log file gets a line a shard
    bar = functools.partial(tqdm, unit="tok", unit_scale=True, disable=None)
    size, workers, shards = writer.args.shard_size, writer.args.workers, writer.meta["shards"]
    clock, listed = [], len(shards)
    so_far = sum(writer.count.values())
    with bar(total=expected, initial=so_far) as whole, bar(total=size, desc="shard") as one:
        for total in totals:
            clock.append((time.perf_counter(), total))
            whole.update(total - whole.n)
            one.update(total % size - one.n)
            for name in list(shards)[listed:]:
                tqdm.write(f"{name}: {shards[name]['tokens']:,} tokens, {total:,} in all")
            listed = len(shards)
    if len(clock) < 10 * workers:
        return ""  # too short to tell
    (start, first), (end, last) = clock[workers], clock[-1]  # by then every worker has started
    rate = (last - first) / (end - start)
    return f", {rate / 1e6:.2f}M tokens/s on {workers} workers once started"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and settle the defaults that depend on other options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = refuse_arguments
    add = parser.add_argument
    add("--dataset", help=f"hub name or folder (default {FINEWEB_EDU}), or pydocs")
    add("--name", help="a configuration of it (default for FineWeb sample-10BT)")
    add("--files", nargs="+", metavar="GLOB", help="local .jsonl, .txt or .parquet files instead")
    add("--text_key", default="text", help="key of the text in a record (default %(default)s)")
    add("--tokenizer", choices=["gpt2", "bytes"], help="(default gpt2, for pydocs bytes)")
    add("--out", help="folder of the shards (default edu_fineweb10B and the like, or pydocs)")
    add("--shard_size", type=int, default=10**8, help="tokens a shard (default %(default)s)")
    add("--val_tokens", type=int, help="validation tokens at most (default a shard's)")
    add("--val_share", type=float, help="of the tokens (default 0.1; hub: 1, they come first)")
    add("--max_tokens", type=int, help="end after so many tokens")
    add("--format", choices=["npy", "bin"], default="npy", help="bin is llm.c's")
    add("--part", default="1/1", metavar="I/N", help="the I-th of N slices of the data's files")
    add("--workers", type=int, help="processes that tokenise (default: every core)")
    streaming = "tokenise during the download (default), or copy it all first"
    add("--streaming", action=argparse.BooleanOptionalAction, default=True, help=streaming)
    add("--overwrite", action="store_true", help="delete this run's shards and begin anew")
    add("--merge", action="store_true", help="list the shards of all parts in one meta.json")
    add("--verify", action="store_true", help="re-read all shards and compare their sha256")
    args = parser.parse_args(argv)
    settle_args(args)
    return args


def settle_args(args: argparse.Namespace) -> None:
    """Fill in defaults and the names of files. Raises ValueError for options that cannot be."""
    if args.files and (args.dataset or args.name):
        raise ValueError("--files and --dataset are two sources: choose one")
    for name, least in {"shard_size": 1, "max_tokens": 1, "workers": 1, "val_tokens": 0}.items():
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(f"--{name} {value}: expected {least} or more")
    if args.format == "bin" and args.shard_size >= 2**31:
        raise ValueError(f"--shard_size {args.shard_size}: .bin counts to 2**31 - 1 tokens at most")
    part = re.fullmatch(r"(\d+)/(\d+)", args.part)
    if not part or not 1 <= int(part[1]) <= int(part[2]):
        raise ValueError(f"--part {args.part}: expected I/N with I from 1 to N, such as 3/128")
    args.part, args.parts = int(part[1]) - 1, int(part[2])  # counted from 0 inside

    args.dataset = None if args.files else args.dataset or FINEWEB_EDU
    args.prefix, folder = DATASETS.get(args.dataset, ("docs", None))
    if "fineweb" in args.prefix:
        args.name = args.name or "sample-10BT"
        folder += re.sub(r"^sample-(\w+)T$", r"\1", args.name)  # 10B; a dump keeps its name
    args.out = args.out or folder
    if args.out is None:
        raise ValueError("--out FOLDER is needed: where do the shards go?")
    suffix = f"-{args.part + 1:03d}-of-{args.parts:03d}" if args.parts > 1 else ""
    args.prefix += suffix  # a part's files have names of their own
    args.meta_path = os.path.join(args.out, f"meta{suffix}.json")

    pydocs = args.dataset == "pydocs"
    args.tokenizer = args.tokenizer or ("bytes" if pydocs else "gpt2")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.workers = args.workers or (1 if pydocs else cores)  # starting a second takes longer
    if args.val_share is None:
        args.val_share = 0.1 if args.files or pydocs else 1.0
    if not 0 <= args.val_share <= 1:
        raise ValueError(f"--val_share {args.val_share}: expected 0 to 1")
    if args.val_tokens is None:
        args.val_tokens = min(args.shard_size, (args.max_tokens or 10 * args.shard_size) // 10)


def interrupt(signum: int, frame: object) -> None:
    """End as Ctrl-C does: a signal handler."""
    raise KeyboardInterrupt(signum)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; without one, the process's own, and then say what to run next.

    Exits with 2 for bad arguments or data, 1 when the work failed, 128 + signal for a signal.
    """
    go_on = "What is finished stays: run the same command to go on."
    status, line, previous = 0, "", signal.signal(signal.SIGTERM, interrupt)
    try:
        args = parse_args(argv)
        (verify if args.verify else merge if args.merge else build)(args)
        if argv is None and args.parts > 1:
            print(f"when all parts are done: python fineweb.py --merge --out {args.out}")
        elif argv is None:
            print(suggest(args.out))
    except (ValueError, FileNotFoundError) as error:
        status, line = 2, str(error)
    except OSError as error:
        status, line = 1, f"{error}. {go_on}"
    except KeyboardInterrupt as stop:
        status, line = 128 + (stop.args or (signal.SIGINT,))[0], f"interrupted. {go_on}"
    finally:
        signal.signal(signal.SIGTERM, previous)
    if status:
        print(f"fineweb.py: {line}", file=sys.stderr)
        sys.exit(status)


if __name__ == "__main__":
    main()
