# /// script
# requires-python = ">=3.11"
# dependencies = ["datasets", "numpy", "tiktoken", "tokenizers", "tqdm"]
# ///
"""Turn documents into shards of tokens for train_gpt2.py: exact, on every core, safe to kill.

python fineweb.py                                       # FineWeb-Edu, 10B tokens: edu_fineweb10B/
python fineweb.py --files notes 'src/**/*.py' --out mine   # your folders, files, globs
python fineweb.py --files texts --tokenizer 16384 --out mine   # a tokenizer made from the texts
python fineweb.py --dataset pydocs                      # Python's own documentation, offline

A folder stands for all files in it but hidden and binary ones. A row of a .jsonl, .json, .csv,
.tsv or .parquet file is a document; any other file is text in UTF-8, and one document, unless lines
with nothing but <|endoftext|> divide it, as in TinyStories. It may be packed (.gz, .xz, .zst).
A shard is a 1-D array of uint16 tokens. A document is its <|endoftext|> token, then those of its
text, and may be cut by shards. A killed run continues with the same command, to the same bytes."""

import argparse
import ast
import csv
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain, zip_longest
from multiprocessing import connection, get_context
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

FINEWEB = "HuggingFaceFW/fineweb-edu"
FOLDERS = {(FINEWEB, "sample-10BT"): "edu_fineweb10B", ("pydocs", None): "pydocs"}  # defaults
META_VERSION = 9  # raised whenever a folder of an older version cannot be continued
OPTIONS = ("dataset", "name", "text_key", "tokenizer", "shard_size", "max_tokens", "val_tokens")
OPTIONS += ("val_share",)  # all that the shards depend on, beside the files
# Lines between documents of a text. The search is fast because the pattern begins with letters
MARK = re.compile(r"<\|endoftext\|>(?<!.<\|endoftext\|>)\r?(?:\n<\|endoftext\|>\r?)*(?:\n|\Z)")
DATA = re.compile(r"(?i)\.(parquet|jsonl?|csv|tsv|gz|xz|zst)$")  # endings of what is not plain text
BATCH_SIZE = 2**19  # bytes of .jsonl, characters of text in a batch: ~0.06 s of work for a worker
GROUP_SIZE = 2**26  # bytes: a larger row group of a .parquet file is read in several batches
SAMPLE_SIZE = 2**25  # bytes of text to train a tokenizer: Chinese takes 3 GB and a minute
# GPT-2's pattern of a word, but with the marks in it, such as vowels of Hindi, Thai or Arabic.
# A token is in a word. None has more than 64 characters, because DNA and Chinese have no blanks
WORD = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]{1,64}| ?\p{N}{1,64}| ?[^\s\p{L}\p{M}\p{N}]{1,64}"
WORD += r"|\s{1,64}(?!\S)|\s"
ADVICE = "undo this, choose another --out, or delete the folder to start over"


class UserError(ValueError):
    """A mistake that the user can put right: what was found, what was expected, what to run."""


def require(condition: object, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


@contextmanager
def naming(what: str) -> Iterator:
    """Turn any error into a UserError that names `what`: few libraries say which file it was."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{what}: {kind}{error}") from error


def write_file(path: str, content: bytes) -> None:
    """Write a file, which appears under its name only once it is whole."""
    temporary = f"{path}.unfinished"  # if a killed run has left one, it is written over
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or a power failure could leave the name without the content
    os.replace(temporary, path)


@lru_cache
def get_tokenizer(tokenizer: str) -> tiktoken.Encoding:
    """Return GPT-2's tokenizer, or that of the bytes and of the tokens after its name, in hex."""
    name, *others = tokenizer.split()
    if name == "gpt2":
        with naming("gpt2's tokens cannot be loaded (without a network: .github/CLUSTERS.md)"):
            return tiktoken.get_encoding("gpt2")
    tokens = [bytes([byte]) for byte in range(256)] + [bytes.fromhex(token) for token in others]
    return tiktoken.Encoding(
        name,
        pat_str=WORD,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": len(tokens)},  # the last one
    )


# ---- sources: which files there are, and the batches of texts in them ----------------------------
# The main process cuts files into batches, which are functions that a worker calls: parse_lines on
# some lines, MARK.split on a text, list on texts, or read_group. The first text that one returns
# continues the document before it, or is empty. The others are documents, or None: a row without.


def list_files(args: argparse.Namespace, old: dict) -> dict[str, list]:
    """Return the dataset's files in order: {address: [size, what changes with the content]}."""
    if args.dataset and old:  # with the commit, or the version of Python, as at the beginning
        return old.get("files", {})
    if args.dataset == "pydocs":
        return {"pydocs": [1, sys.version.split()[0]]}
    if args.dataset:
        return {address: [1, address] for address in find_on_hub(args.dataset, args.name)}
    paths = {}
    named = set()  # by themselves, and not because they are in a folder
    for name in map(os.path.expanduser, args.files):
        # A name, even with brackets, or a glob. A folder stands for all that is not hidden in it
        found = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        named |= {os.path.abspath(path) for path in found}
        for top in list(found):
            for folder, subfolders, names in os.walk(top):  # follows no links, which may lead back
                subfolders[:] = [name for name in subfolders if name[0] != "."]
                found += [os.path.join(folder, name) for name in names if name[0] != "."]
        found = sorted(filter(os.path.isfile, found))
        require(found, f"--files {name}: there is no such file")
        paths |= {os.path.realpath(path): os.path.abspath(path) for path in found}  # no file twice
    files = {}
    for path in sorted(paths.values()):
        if Path(args.out).resolve() in Path(path).resolve().parents:  # our own shards
            continue
        size = os.path.getsize(path)
        try:
            begin(path, size, args.text_key)
        except UserError as error:
            require(path not in named, str(error))
            print(f"{str(error)[:300]}: it is left out")  # as a picture among notes
            continue
        with open(path, "rb") as file:
            files[path] = [size, hashlib.sha256(file.read(2**16)).hexdigest()]
    return files


def begin(path: str, size: int, text_key: str) -> None:
    """Raise UserError unless a file begins with a text."""
    with naming(path), open(path, "rb") as file:
        if not re.search(r"(?i)\.parquet$", path):
            start = unpack(file, os.path.splitext(path.lower())[1]).read(2**16)
            require(b"\0" not in start, "it is packed, or not in UTF-8 (save UTF-16 as UTF-8)")
        if DATA.search(path):
            first = next(
                read_file(path, size, text_key), None
            )  # where a column is missing, it fails
            if first and first[1].func is parse_lines:
                lines, *rest = first[1].args
                parse_lines([line for line in lines if not line.isspace()][:1], *rest)


def find_on_hub(dataset: str, name: str | None) -> list[str]:
    """Return the addresses of the training files of a dataset on the Hugging Face hub."""
    import datasets  # takes seconds, so only here

    url = f"{datasets.config.HF_ENDPOINT}/datasets/{dataset}/tree/main"
    with naming(f"{url} cannot be read (HF_ENDPOINT: mirror, HF_TOKEN: account, --files: a copy)"):
        splits = datasets.load_dataset_builder(dataset, name).config.data_files
    require("train" in splits, f"{dataset} has no split train, but {sorted(splits)}")
    return list(splits["train"])


def read_file(address: str, size: int, text_key: str) -> Iterator[tuple]:
    """Yield (share of the file that has been read, batch)."""
    name, packing = os.path.splitext(address.lower())
    ending = os.path.splitext(name)[1] if packing in (".gz", ".xz", ".zst") else packing
    with naming(address):
        if address == "pydocs":
            yield 1.0, partial(list, ["", *read_pydocs()])
        elif ending == ".parquet":
            yield from read_parquet(address, text_key)
        else:
            file = open_file(address, "readahead")
            lines = unpack(file, packing)
            if ending in (".json", ".jsonl"):
                batches = read_jsonl(lines, text_key)
            elif ending in (".csv", ".tsv"):
                batches = read_csv(lines, text_key, {".csv": ",", ".tsv": "\t"}[ending])
            else:
                batches = read_txt(lines)
            yield from ((min(1.0, file.tell() / size), batch) for batch in batches)


def unpack(file: io.BufferedIOBase, packing: str) -> io.BufferedIOBase:
    """Return the content of a file that is packed in this way, or not at all."""
    if packing == ".zst":
        import pyarrow  # unlike zstandard's, its stream notices a truncated file

        file = pyarrow.CompressedInputStream(file, "zstd")
    return {".gz": gzip.open, ".xz": lzma.open}.get(packing, io.BufferedReader)(file)


def open_file(address: str, cache: str) -> io.BufferedIOBase:
    """Open a file, local or on the hub."""
    if "://" not in address:
        return open(address, "rb")
    import fsspec

    system, path = fsspec.url_to_fs(address)
    return system.open(path, "rb", cache_type=cache)


@lru_cache(1)
def open_parquet(address: str):
    """Return an open .parquet file. A process keeps it open: on the hub, opening takes a second."""
    from pyarrow import parquet

    # The buffer holds the texts of FineWeb's row groups, so that each of them is one request
    return parquet.ParquetFile(open_file(address, "none"), buffer_size=2**24)  # bytes


def read_parquet(address: str, text_key: str) -> Iterator[tuple]:
    """Yield the batches of a .parquet file: its row groups, which in FineWeb have 1,000 rows."""
    open_parquet.cache_clear()  # in an earlier call of main, another file may have had this name
    file = open_parquet(address)
    names = file.schema_arrow.names
    require(text_key in names, f"found the columns {names}, expected {text_key}: see --text_key")
    row = 0
    for group in range(file.num_row_groups):
        if file.metadata.row_group(group).total_byte_size <= GROUP_SIZE:
            row += file.metadata.row_group(group).num_rows
            yield row / (file.metadata.num_rows or 1), partial(read_group, address, text_key, group)
        else:  # pandas writes a million rows as one group: too many for a worker's memory
            for rows in file.iter_batches(128, [group], [text_key]):  # ~0.6 MB of FineWeb
                row += len(rows)
                batch = partial(list, ["", *rows.column(text_key).to_pylist()])
                yield row / file.metadata.num_rows, batch


def read_group(address: str, text_key: str, group: int) -> list[str | None]:
    """Return the texts of a row group, which the process that tokenizes them reads itself."""
    table = open_parquet(address).read_row_group(group, [text_key])
    return ["", *table.column(text_key).to_pylist()]


def read_csv(file: io.BufferedIOBase, text_key: str, delimiter: str) -> Iterator[partial]:
    """Yield the batches of a .csv or .tsv file. Row 1 names the columns. None has over 4 MB."""
    from pyarrow import csv as arrow
    from pyarrow import string

    if delimiter == "," and file.seekable():  # PyArrow would take all behind an open quote as text
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        csv.field_size_limit(2**31 - 1)  # bytes of a cell
        for row in csv.reader(chain(text, ["\n", "the end"])):
            last = row
        found = "a quote begins a cell and is never closed, or commas do not divide the cells"
        require(last == ["the end"], found)
        text.detach().seek(0)
    header = file.peek(1000).partition(b"\n")[0]
    quote = False if delimiter == "\t" else '"'  # in a .tsv, a quote is a character like others
    parse = arrow.ParseOptions(delimiter=delimiter, quote_char=quote, newlines_in_values=True)
    convert = arrow.ConvertOptions(include_columns=[text_key], column_types={text_key: string()})
    with naming(f"of {header}, divided by {delimiter!r}, --text_key {text_key} cannot be read"):
        blocks = arrow.open_csv(file, arrow.ReadOptions(block_size=2**22), parse, convert)  # bytes
    for rows in blocks:
        yield partial(list, ["", *(text or None for text in rows.column(0).to_pylist())])


def read_jsonl(file: io.BufferedIOBase, text_key: str) -> Iterator[partial]:
    """Yield the batches of a file with a record on each line, or of an array, read at once."""
    if file.peek(99).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):  # its rows become lines
        file = io.BytesIO("\n".join(map(json.dumps, json.load(file))).encode())
    number = 1
    while lines := file.readlines(BATCH_SIZE):
        yield partial(parse_lines, lines, number, text_key)
        number += len(lines)


def parse_lines(lines: list[bytes], first: int, text_key: str) -> list[str | None]:
    """Return the texts of the lines that are not blank. `first` is the number of the first line."""
    expected = f'expected lines like {{"{text_key}": "..."}} (--text_key)'
    texts = [""]
    for number, line in enumerate(lines, first):
        if not line.isspace():
            with naming(f"line {number}: {expected}, found {line[:50]!r}"):
                text = json.loads(line.decode("utf-8-sig"))[text_key]  # -sig skips byte order marks
                # JSON can spell half of a surrogate pair, which UTF-8 cannot: it becomes U+FFFD
                text = None if text is None else re.sub("[\ud800-\udfff]", "\ufffd", text)
                texts.append(text)
    return texts


def read_txt(file: io.BufferedIOBase) -> Iterator[partial]:
    """Yield the batches of a text file, which may be larger than the memory."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # -sig skips a byte order mark
    rest = "<|endoftext|>\n"  # the line that begins the first document
    with naming("it is not text in UTF-8 (to convert it: iconv -f WINDOWS-1252 -t UTF-8)"):
        while block := text.read(BATCH_SIZE):
            *pieces, rest = cut(rest + block)
            yield from (partial(MARK.split, piece) for piece in pieces)
    rest = re.sub(r"(\n<\|endoftext\|>\r?)+\s*\Z", "\n", rest)  # no document begins at the end
    yield partial(MARK.split, rest)


def read_pydocs() -> Iterator[str]:
    """Yield Python's reference and the docstrings of its library, which together are 2 MB."""
    from pydoc_data.topics import topics

    skip = r"tests?|.*_tests?|(site|dist)-packages|idlelib|lib2to3|turtledemo|encodings|pydoc_data"
    paths = []
    for folder, subfolders, names in os.walk(os.path.dirname(os.__file__)):
        subfolders[:] = [name for name in subfolders if not re.fullmatch(skip, name)]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(paths):
        tree = ast.parse(Path(path).read_bytes())  # the module is parsed, and never imported
        texts.append("\n\n".join(find_docstrings(tree, Path(path).stem)))
    # Drop what came before: topics quote each other, and validation needs text of its own
    seen = set()
    for text in texts:
        text = text.translate(str.maketrans("‘’“”–\t", "''\"\"- ")).strip("\n")
        new = []
        for paragraph in map(str.rstrip, re.split(r"\n\s*\n", text)):
            if len(paragraph) < 60 or paragraph not in seen:  # short ones may repeat
                new.append(paragraph)
            seen.add(paragraph)
        text = "\n\n".join(new) + "\n"
        if len(text) > 200:  # shorter ones say nothing
            yield text


def find_docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, each after its dotted name."""
    if text := ast.get_docstring(node):
        yield f"{name}: {text}"
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from find_docstrings(child, f"{name}.{child.name}")


# ---- a tokenizer of one's own --------------------------------------------------------------------


def choose_tokenizer(args: argparse.Namespace, files: dict[str, list]) -> str:
    """Return what get_tokenizer takes: a name, the tokenizer of other shards, or a new one."""
    if args.tokenizer.isdecimal():
        return train_tokenizer(files, args.text_key, int(args.tokenizer))
    if args.tokenizer in ("gpt2", "bytes"):
        return args.tokenizer
    path = Path(args.tokenizer, "meta.json")
    require(
        path.exists(), f"--tokenizer {args.tokenizer}: expected gpt2, bytes, a number or shards"
    )
    with naming(f"{path} names no tokenizer"):
        return json.loads(path.read_bytes())["tokenizer"]


def sample_texts(files: dict[str, list], text_key: str) -> Iterator[str]:
    """Yield all texts or, of more than SAMPLE_SIZE bytes, a sample that is spread over all."""
    size = 0
    for (_, share), address, batch in read_batches(files, text_key, [0, 0]):
        if size <= share * SAMPLE_SIZE:  # the sample has no more than its share of what was read
            with naming(address):
                for text in filter(None, batch()):
                    size += len(text.encode())
                    yield from cut(text)


def train_tokenizer(files: dict[str, list], text_key: str, size: int) -> str:
    """Return a byte-level BPE tokenizer: its name, then its tokens beyond the bytes, in hex."""
    from tokenizers import Regex, Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    print(f"training a tokenizer of {size} tokens: a minute at most", flush=True)
    bpe = Tokenizer(models.BPE())
    words = Split(Regex(WORD), "isolated")
    bpe.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = sorted(ByteLevel.alphabet())  # of 256 characters, which stand for the bytes
    rest = {"initial_alphabet": alphabet, "min_frequency": 2, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size - 1, **rest)  # <|endoftext|> is the last one
    bpe.train_from_iterator(sample_texts(files, text_key), trainer)
    # Visible bytes stand for themselves, and characters from U+0100 on for the others, in order
    visible = [ord(c) for c in alphabet if c < "\u0100"]
    byte_of = dict(zip(alphabet, visible + sorted({*range(256)} - {*visible}), strict=True))
    vocabulary = bpe.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)[256:]
    count = len(tokens) + 257
    if count < size:
        print(f"it has only {count}, because no other two tokens follow each other twice in words")
    tokens = " ".join(bytes(byte_of[c] for c in token).hex() for token in tokens)
    return f"bpe-{count}-{hashlib.sha256(tokens.encode()).hexdigest()[:6]} {tokens}"


# ---- from batches to tokens ----------------------------------------------------------------------


def cut(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most BATCH_SIZE characters: tiktoken can fail on longer ones."""
    # GPT-2's pattern always splits a text between a visible character and a blank or line end, so
    # the pieces have the tokens of the whole. `.*` matches all it can, which finds the last such
    # place. No piece ends with >, so that the line <|endoftext|> and its end are in one piece
    until_break = re.compile(r"(?s:.*[^\s>])(?=[ \r\n])")
    start = 0
    while len(text) - start > BATCH_SIZE:
        end = start + BATCH_SIZE  # DNA or a million blanks have no good place to cut
        if found := until_break.match(text, start, end):
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


def read_batches(files: dict[str, list], text_key: str, position: list) -> Iterator[tuple]:
    """Yield ((place, share of the bytes read), address, batch) from a position on."""
    sizes = [max(1, size) for size, _ in files.values()]
    for k, address in list(enumerate(files))[position[0] :]:
        for number, (share, batch) in enumerate(read_file(address, sizes[k], text_key)):
            if [k, number] >= position[:2]:
                read = sum(sizes[:k]) + share * sizes[k]
                yield ([k, number], read / sum(sizes)), address, batch


def encode(tokenizer: str, address: str, batch: partial) -> tuple[np.ndarray, int]:
    """Return the tokens of a batch, whose first text continues a document, and its rows without."""
    enc = get_tokenizer(tokenizer)
    pieces = []
    with naming(address):
        texts = batch()
        for text in (text for text in texts if text is not None):
            require(isinstance(text, str), f"found {type(text)}, expected a text: see --text_key")
            pieces.append([enc.eot_token])
            # If a text quotes <|endoftext|>, it is encoded like other characters, not as the token
            pieces += [enc.encode_to_numpy(piece, disallowed_special=()) for piece in cut(text)]
    return np.concatenate(pieces[1:], dtype=np.uint16, casting="unsafe"), texts.count(None)


def work(pipe: connection.Connection, tokenizer: str) -> None:
    """Encode the batches that arrive by a pipe, in a process of its own."""
    answer = None  # the first one says that this worker is ready
    with suppress(EOFError, OSError):  # the main process has ended, in whatever way
        while True:
            pipe.send(answer)
            try:
                answer = encode(tokenizer, *pipe.recv())
            except UserError as error:
                answer = error


def tokenize(batches: Iterator[tuple], tokenizer: str, workers: int) -> Iterator[tuple]:
    """Yield (place, result of encode) for all batches, in order, by this many processes."""
    if workers == 1:
        yield from ((place, encode(tokenizer, *job)) for place, *job in batches)
        return
    busy = {}  # {pipe to a worker: [place, None] of its batch, also in `waiting`}, oldest first
    # Processes: Python's lock would limit many threads. A fork would copy locks that threads hold
    context = get_context("spawn")
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit that it is ignored
    with naming(f"--workers {workers}: use fewer, or a higher ulimit -n"):
        for _ in range(workers):
            pipe, other = context.Pipe()
            context.Process(target=work, args=(other, tokenizer), daemon=True).start()
            other.close()  # now the worker alone holds this end: when it dies, the pipe ends
            busy[pipe] = [None, None]
    signal.signal(signal.SIGINT, handler)
    waiting = []  # [place, result or None], in the order of the documents
    try:
        while busy:
            # Workers that are far ahead wait for the oldest batch: tokens must not fill the memory
            count = workers if len(waiting) < 4 * workers else 1
            for pipe in connection.wait(list(busy)[:count]):
                result = busy.pop(pipe)
                result[1] = pipe.recv()
                if isinstance(result[1], UserError):
                    raise result[1]
                if following := next(batches, None):
                    pipe.send(following[1:])
                    busy[pipe] = [following[0], None]
                    waiting.append(busy[pipe])
            while waiting and waiting[0][1] is not None:
                yield waiting.pop(0)
    except (EOFError, OSError) as error:  # of a pipe: reading a file raises UserErrors only
        raise UserError("a worker was killed: if memory was full, use fewer --workers") from error


# ---- from tokens to shards -----------------------------------------------------------------------
# The tokens of all files, one after the other, are cut into chunks of --shard_size. While one chunk
# is filled in memory, a thread divides the last one into validation and training, writes a shard of
# each, and then meta.json, which says how many chunks are finished, and where the next one begins:
# [file, batch in it, token in the batch, hash of its tokens before that]. The same command reads on
# from there, and writes shards that are not in meta.json yet again, with the same bytes. What was
# read must be as it was, under whatever name. What was not may change: a file can be mended.


def write_shards(args: argparse.Namespace, meta: dict) -> None:
    """Fill chunk after chunk from the position in meta.json on."""
    if meta["progress"]["chunks"] == 0:  # the folder is tried before hours of work
        os.makedirs(args.out, exist_ok=True)
        write_file(f"{args.out}/meta.json", json.dumps(meta, indent=1).encode())
    position = meta["progress"]["position"]
    nulls = meta["rows_without_text"]
    total = count_tokens(meta)  # so far
    budget = args.max_tokens or sys.maxsize
    chunk = np.empty(args.shard_size, dtype="<u2")  # 200 MB by default
    start = position[2]  # tokens of the first batch that are in a chunk already
    changed = f"a file of {args.out} has changed where it was being read: {ADVICE}"
    batches = read_batches(meta["files"], args.text_key, position)
    batches = tokenize(batches, meta["tokenizer"], args.workers)
    bar = tqdm(initial=total, unit=" tokens", unit_scale=True, disable=None)  # on a terminal only
    with bar, ThreadPoolExecutor(1) as writer:
        saved = writer.submit(int)  # the chunk before: at first none, and int() returns
        for (place, share), (tokens, new_nulls) in batches:
            read = [*place, start, hashlib.sha256(tokens[:start]).hexdigest()]
            require(start == 0 or read == position, changed)
            nulls += new_nulls * (start == 0)
            while start < len(tokens) and total < budget:
                filled = total % args.shard_size  # tokens in the chunk
                size = min(len(tokens) - start, args.shard_size - filled, budget - total)
                chunk[filled : filled + size] = tokens[start : start + size]
                start += size
                total += size
                if filled + size == args.shard_size:
                    saved.result()  # waits for the chunk before, and raises what went wrong there
                    read = [*place, start, hashlib.sha256(tokens[:start]).hexdigest()]
                    saved = writer.submit(save_chunk, args, meta, chunk, nulls, read)
                    chunk = np.empty_like(chunk)
            bar.total = min(budget, round(total / max(share, 1e-9)))  # about, if not the budget
            bar.update(total - bar.n)
            start = 0
            if total == budget:
                break
        require(start == 0, changed)
        saved.result()
    save_chunk(args, meta, chunk[: total % args.shard_size], nulls)  # may be short or empty


def save_chunk(args, meta: dict, tokens: np.ndarray, nulls: int, position: list | None = None):
    """Write a shard of each split, then meta.json with the next position (None at the end)."""
    is_val = choose_validation(args, meta, tokens)
    chunks = meta["progress"]["chunks"]
    for split, chosen in (("val", is_val), ("train", ~is_val)):
        if chosen.any():
            name = f"{split}_{chunks:06d}.npy"
            shard = io.BytesIO()
            np.save(shard, tokens[chosen])
            write_file(f"{args.out}/{name}", shard.getvalue())
            sha256 = hashlib.sha256(shard.getvalue()).hexdigest()
            meta["shards"][name] = {"tokens": int(chosen.sum()), "sha256": sha256}
    meta["progress"] = {"chunks": chunks + 1, "position": position, "done": position is None}
    meta["rows_without_text"] = nulls
    write_file(f"{args.out}/meta.json", json.dumps(meta, indent=1).encode())


def choose_validation(args: argparse.Namespace, meta: dict, tokens: np.ndarray) -> np.ndarray:
    """Return the mask of a chunk's validation tokens."""
    # Documents are cut into pieces of 1/32 of all tokens so far, 16 to 8192, so that a small corpus
    # gives some of everything. Validation gets a piece whenever it has no more than its share
    is_val = np.zeros(len(tokens), dtype=bool)
    val = count_tokens(meta, "val")
    total = count_tokens(meta)
    limit = args.val_tokens if args.val_share > 0 else 0
    ends = np.append(np.flatnonzero(tokens == meta["eot"]), len(tokens))  # of documents
    start = 0
    for end in ends.tolist():
        while start < end and val < limit:
            size = min(end - start, 8192, max(16, total // 32))
            if val <= args.val_share * total:
                size = min(size, limit - val)
                is_val[start : start + size] = True
                val += size
            start += size
            total += size
    return is_val


def count_tokens(meta: dict, split: str = "") -> int:
    """Return how many tokens the finished shards of a split, or all of them, have."""
    return sum(shard["tokens"] for name, shard in meta["shards"].items() if split in name)


def find_meta(args: argparse.Namespace) -> dict:
    """Return this run's meta.json as an earlier start left it, or a new one, after all checks."""
    shards = list(Path(args.out).glob("*.npy"))
    path = Path(args.out, "meta.json")
    found = {}
    if shards:  # without, nothing was made yet
        require(path.exists(), f"{args.out} holds shards, but no meta.json: choose another --out")
        with naming(f"{path} is damaged: delete the folder to start over"):
            found = json.loads(path.read_bytes())
    options = {"version": META_VERSION} | {key: getattr(args, key) for key in OPTIONS}
    if found:
        for key, new in options.items():
            old = found.get("options", {}).get(key)
            require(old == new, f"{path} has {key} {old}, not {new}: {ADVICE}")
    files = list_files(args, found)
    if found:
        # Files that were read to their end must be there, in this order, under whatever names
        position = found["progress"]["position"] or [None]  # None: all were read
        before, now = (list(x.items())[: position[0]] for x in (found["files"], files))
        for (was, old), (name, new) in zip_longest(before, now, fillvalue=("nothing", None)):
            require(old == new, f"{name} (before: {was}) is new, missing or changed: {ADVICE}")
    require(files, "found no file of text (to_parquet makes one of a dataset's .arrow files)")
    tokenizer = found.get("tokenizer") or choose_tokenizer(args, files)
    enc = get_tokenizer(tokenizer)
    meta = {
        "tokenizer": tokenizer,  # this and the next two are for the trainer
        "vocab_size": enc.n_vocab,
        "eot": enc.eot_token,
        "options": options,  # every start compares them
        "shards": {},  # {name: {"tokens": count, "sha256": hexadecimal}}
        "progress": {"chunks": 0, "position": [0, 0, 0, ""], "done": False},
        "rows_without_text": 0,
    }
    meta |= found
    meta["files"] = files  # every start compares those that were read
    for name, shard in meta["shards"].items():
        with naming(f"{args.out}/{name} is not as it was: put it back, or delete the folder"):
            sha256 = hashlib.sha256(Path(args.out, name).read_bytes()).hexdigest()
            require(sha256 == shard["sha256"], "its content has changed")
    return meta


# ---- command line --------------------------------------------------------------------------------


def look(args: argparse.Namespace, meta: dict) -> tuple[float, str]:
    """Return how many bytes a token of the training data has, and words that begin a document."""
    name = next(name for name in meta["shards"] if name.startswith("train"))
    tokens = np.load(Path(args.out, name), mmap_mode="r")[: 10**6]
    enc = get_tokenizer(meta["tokenizer"])
    size = len(enc.decode_bytes(tokens[tokens != meta["eot"]].tolist())) / len(tokens)
    begin = int(np.argmax(tokens == meta["eot"]))
    text = enc.decode_bytes(tokens[begin : begin + 60].tolist()).decode(errors="ignore")
    words = text.replace("<|endoftext|>", "").split()
    prompt = " ".join(words[:2])
    return size, prompt if len(prompt) <= 20 else words[0][:20]


def suggest(args: argparse.Namespace, meta: dict, prompt: str) -> str:
    """Return the next command, for this amount of text."""
    command = f"python train_gpt2.py --data_dir {shlex.quote(args.out)}"
    train = count_tokens(meta, "train")
    if args.tokenizer == "gpt2" and train >= 2.5e9:
        return f"next: {command}"
    command += " --val_every 0" * (count_tokens(meta, "val") == 0)  # --val_share is 0
    command += " --log_dir " + shlex.quote("log/" + Path(args.out).resolve().name)
    command += f" --prompt {shlex.quote(prompt)}"
    # All of the validation text, if that is possible: it is in the order of the files
    val_tokens = min(count_tokens(meta, "val"), 500_000)
    on_cpu = f"next: {command} --quickstart --val_tokens {val_tokens}"
    if train >= 10**8:
        # A step has about 27.5 * max_steps tokens by default, which makes this about four epochs
        return f"next: {command} --optimizer muon --max_steps {round((4 * train / 27.5) ** 0.5)}"
    steps = 4 * train // 16384 + 1  # four epochs
    on_gpu = f"{command} --optimizer muon --model d6 --seq_len 256"
    if args.tokenizer == "gpt2":  # OpenAI's model knows English already
        steps = 3 * train // 16384 + 1
        on_gpu = f"{command} --init_from gpt2"
        on_gpu += " --seq_len 256" * (count_tokens(meta, "val") <= 1024)  # its context
    on_gpu += f" --total_batch_size 16384 --max_steps {steps}"
    if count_tokens(meta, "val"):  # to see whether the texts are learnt by heart
        on_gpu += f" --val_every {steps // 10 + 1}"
    if meta["vocab_size"] <= 2**13:  # few enough for a CPU
        return f"{on_cpu}\nor, on a GPU: {on_gpu}"
    return f"next, on a GPU (without one, use --tokenizer 2048 and another --out): {on_gpu}"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and fill in the defaults that depend on other options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("fineweb.py", description=__doc__, formatter_class=raw)
    parser.error = partial(require, False)  # raises UserError: one line, not argparse's several
    add = parser.add_argument
    add("--dataset", help=f"name on the Hugging Face hub (default {FINEWEB}), or pydocs")
    add("--name", help="configuration of the dataset (default for FineWeb: sample-10BT)")
    add("--files", nargs="+", metavar="PATH", help="files, globs, folders")
    add("--text_key", default="text", help="key or column of the texts (default %(default)s)")
    add("--tokenizer", help="gpt2 (default), bytes, a size to train one, or shards that have one")
    add("--out", help="folder of the shards (default edu_fineweb10B or pydocs)")
    add("--shard_size", type=int, default=10**8, help="tokens of train + val shard (default 100M)")
    add("--val_tokens", type=int, help="for validation (default: shard_size or max_tokens / 10)")
    add("--val_share", type=float, help="share for validation, up to val_tokens (0.1; FineWeb: 1)")
    add("--max_tokens", type=int, help="stop after this many tokens")
    add("--workers", type=int, help="processes (default: 1 per core, from the hub 1.5)")
    args = parser.parse_args(argv)
    require(not (args.files and args.dataset), "--files and --dataset are two sources: choose one")
    args.dataset = args.dataset or (None if args.files else FINEWEB)
    args.name = args.name or {FINEWEB: "sample-10BT"}.get(args.dataset)
    args.out = os.path.expanduser(args.out or FOLDERS.get((args.dataset, args.name), ""))
    require(args.out, "--out FOLDER is needed: where do the shards go?")
    args.tokenizer = args.tokenizer or {"pydocs": "2048"}.get(args.dataset, "gpt2")
    if args.tokenizer.isdecimal():
        require(257 < int(args.tokenizer) <= 65536, "--tokenizer: expected 258 to 65536 tokens")
    if args.workers is None:
        # A job may use some cores only. While a worker waits for the hub, another can use its core
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        args.workers = {None: cores, "pydocs": 1}.get(args.dataset, cores + cores // 2)
    for n in (args.shard_size, args.workers, args.max_tokens):
        require(n is None or n > 0, "--shard_size, --workers and --max_tokens are at least 1")
    if args.val_share is None:
        # FineWeb is shuffled, and build-nanogpt validates on its start. Other data may be sorted
        args.val_share = {FINEWEB: 1.0}.get(args.dataset, 0.1)
    require(0 <= args.val_share <= 1, "--val_share is a number from 0 to 1")
    if args.val_tokens is None:
        args.val_tokens = min(args.shard_size, (args.max_tokens or 10 * args.shard_size) // 10)
    return args


def main(argv: list[str] | None = None) -> None:
    """Run a command line. Without one, run that of the process, and say what to run next."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # or each process reports each new try
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may hold what a console cannot print
    try:
        args = parse_args(argv)
        meta = find_meta(args)
        if not meta["progress"]["done"]:
            hub = "; the hub may make us wait (less with HF_TOKEN)" * ("/" in str(args.dataset))
            print(f"making {args.out}: if interrupted, the same command continues{hub}", flush=True)
            write_shards(args, meta)
        train = count_tokens(meta, "train")
        require(train, "no training tokens: more files, or a lower --val_share?")
        if nulls := meta["rows_without_text"]:
            print(f"{nulls:,} row(s) had no text")
        print(f"{train:,} tokens to train and {count_tokens(meta, 'val'):,} to validate")
        size, prompt = look(args, meta)
        if train * size < 10**5:
            print("this is too little to learn from: a model needs 120 KB of text or more")
        if args.tokenizer != "bytes":
            print(f"a token has {size:.2f} bytes")
        if args.tokenizer == "gpt2" and size < 3:  # English has 3.4 to 4.6
            print("GPT-2's tokens fit these texts badly. This makes tokens of their own:")
            words = sys.argv[1:] if argv is None else argv
            better = shlex.join([*words, "--out", f"{args.out}_4096"])  # of two, the last counts
            print(f"python fineweb.py {better} --tokenizer 4096")
        if argv is None and train >= 3000:  # a tenth of fewer is no context for validation
            print(suggest(args, meta, prompt))
    except (UserError, OSError) as error:
        print("fineweb.py:", *str(error).split(), file=sys.stderr)  # all its lines as one
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 plus SIGINT's number


if __name__ == "__main__":
    main()
