# /// script
# requires-python = ">=3.11"
# dependencies = ["datasets", "numpy", "tiktoken>=0.9", "tokenizers", "tqdm"]
# ///
"""Turn documents into shards of tokens for train_gpt2.py: exact, on every core, safe to kill.

python fineweb.py                                       # FineWeb-Edu, 10B tokens: edu_fineweb10B/
python fineweb.py --files notes "src/**/*.py" --out mine   # your folders, files, globs
python fineweb.py --files texts --tokenizer 16384 --out mine   # a tokenizer made from the texts
python fineweb.py --dataset pydocs                      # Python's own documentation, offline

- A folder stands for all files in it and in folders that it links to, but hidden and binary ones.
- In a .jsonl, .json, .csv, .tsv or .parquet file, each row with a text is a document.
- A file with another name that begins with { and a quote is read as .jsonl, too.
- Any other file is a document in UTF-8. Where a line ends with <|endoftext|>, the next one begins.
- A file may be packed (.gz, .xz, .zst).
- Line ends of .csv and text files become \\n. In a .csv, blanks after a comma are dropped, and a
  line that repeats the first one is skipped. Nothing else in a text is changed.
- A shard is a 1-D array of uint16 tokens.
- A document is its <|endoftext|> token, then the tokens of its text. It may lie in two shards.
- A killed run continues with the same command, to the same bytes."""

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
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice, zip_longest
from pathlib import Path
from string import Formatter
from threading import Thread, local
from typing import NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

FINEWEB = "HuggingFaceFW/fineweb-edu"
FOLDERS = {(FINEWEB, "sample-10BT"): "edu_fineweb10B", ("pydocs", None): "pydocs"}  # defaults
META_VERSION = 11  # raised whenever a folder of an older version cannot be continued
EOT = "<|endoftext|>"
BATCH_SIZE = 2**18  # characters that a thread encodes at a time, in ~0.02 s
SAMPLE_SIZE = 2**25  # bytes of text to train a tokenizer: Chinese takes 3 GB and a minute
# GPT-2's pattern of a word, but with combining characters, such as vowels of Hindi. No token goes
# beyond a word. DNA and Chinese have no blanks, so a word has at most 64 characters
WORD = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]{1,64}| ?\p{N}{1,64}| ?[^\s\p{L}\p{M}\p{N}]{1,64}"
WORD += r"|\s{1,64}(?!\S)|\s"
# GPT-2's pattern always splits a text between a visible character and a blank or line end, so what
# is cut there has the tokens of the whole. `.*` matches all it can: up to the last such place
UNTIL_BREAK = re.compile(r"(?s:.*\S)(?=[ \r\n])")
ADVICE = "undo this, choose another --out, or delete the folder to start over"


class UserError(ValueError):
    """A mistake that the user can put right: what was found, what was expected, what to run."""


def require(condition: object, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


@contextmanager
def naming(what: str, kind: type = Exception) -> Iterator:
    """Turn an error into a UserError that names `what`: few libraries say which file it was."""
    try:
        yield
    except kind as error:
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{what}: {name}{error}") from error


def write_file(path: str, content: bytes) -> None:
    """Write a file, which appears under its name only once it is whole."""
    temporary = f"{path}.{os.getpid()}.unfinished"  # two processes may make the same file at once
    with naming(f"{path} cannot be written", OSError):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power failure could leave the name without content
            with suppress(FileNotFoundError):  # another process that made all has deleted it
                os.replace(temporary, path)
        finally:  # it is still there if the disk is full. What kills leave is deleted by main
            Path(temporary).unlink(missing_ok=True)


def get_tokenizer(tokenizer: str) -> tiktoken.Encoding:
    """Return a tokenizer: gpt2, or the 256 bytes and the tokens that follow its name in hex. It is
    a new copy, because threads that share one wait for its regular expression."""
    name, *others = tokenizer.split()
    if name == "gpt2":
        with naming("gpt2's tokens cannot be loaded (without a network: .github/CLUSTERS.md)"):
            gpt2 = tiktoken.get_encoding("gpt2")
        pattern = gpt2._pat_str
        ranks = gpt2._mergeable_ranks
        special = gpt2._special_tokens
    else:
        tokens = [bytes([byte]) for byte in range(256)] + [*map(bytes.fromhex, others)]
        pattern = WORD
        ranks = {token: rank for rank, token in enumerate(tokens)}
        special = {EOT: len(tokens)}  # the last one
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


# ---- from files to texts -------------------------------------------------------------------------


def list_files(args: Namespace) -> dict[str, list]:
    """Return the dataset's files in order: {address: [size, what changes with the content]}."""
    if args.dataset == "pydocs":
        return {"pydocs": [1, sys.version]}
    if args.dataset:  # the sizes are not known, so all files count the same
        return {address: [2**30, address] for address in find_on_hub(args.dataset, args.name)}
    files = {}
    named = set(map(os.path.abspath, args.files))
    for path in find_paths(args):
        try:
            next(read_file(path, args.text_key), None)
        except UserError as error:
            cause = error.__cause__
            is_failure = isinstance(cause, MemoryError) or getattr(cause, "errno", None)
            if path in named or is_failure:  # of the disk or the memory, and not of the file
                raise
            print(f"{error!s:.300}: it is left out")  # as a picture among notes
            continue
        digest = hashlib.sha256()  # hashlib.file_digest is slow for many small files
        with naming(path), open(path, "rb", buffering=0) as file:
            while block := file.read(2**18):
                digest.update(block)
            size = max(1, file.tell())  # an empty file may grow until it is read
        files[path] = [size, digest.hexdigest()]
    require(files, f"found no file of text outside --out {args.out} (.arrow files need to_parquet)")
    return files


def find_paths(args: Namespace) -> list[str]:
    """Return the files that --files stands for, in order, and none of them twice."""
    paths = {}
    for name in args.files:
        # A name, even with brackets, or a glob
        found = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        inside = sorted(path for top in found for path in walk(top))
        require(inside, f"--files {name}: found no file (expected files, folders, globs; no URL)")
        paths |= {os.path.realpath(path): os.path.abspath(path) for path in inside}
    out = os.path.realpath(args.out) + os.sep  # holds shards, which are no texts
    return sorted(path for real, path in paths.items() if not real.startswith(out))


def walk(top: str) -> list[str]:
    """Return a file, or all files in a folder and its links but for hidden ones."""
    if os.path.isfile(top):
        return [top]
    paths = []
    seen = set()  # folders, because links may lead back
    for folder, subfolders, names in os.walk(top, onerror=print, followlinks=True):
        if os.path.realpath(folder) in seen:
            subfolders.clear()  # os.walk goes no deeper here
            continue
        seen.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if name[0] != ".")
        paths += [os.path.join(folder, name) for name in names if name[0] != "."]
    return [path for path in paths if os.path.isfile(path)]


def find_on_hub(dataset: str, name: str | None) -> list[str]:
    """Return the addresses of the training files of a dataset on the Hugging Face hub."""
    import datasets  # takes seconds, so only here

    url = f"{datasets.config.HF_ENDPOINT}/datasets/{dataset}/tree/main"
    with naming(f"{url} cannot be read (HF_ENDPOINT: mirror, HF_TOKEN: account, --files: a copy)"):
        splits = datasets.load_dataset_builder(dataset, name).config.data_files
    require("train" in splits, f"{dataset} has no split train, but {sorted(splits)}")
    return list(splits["train"])


def read_file(address: str, text_key: str) -> Iterator[tuple]:
    """Yield (text or part of a long one, whether it begins a document, share of the file read)."""
    if address == "pydocs":
        yield from ((text, True, 1.0) for text in read_pydocs())
        return
    template = split_key(text_key)
    with naming(address), open(fetch(address), "rb") as file:
        is_pointer = file.peek(1).startswith(b"version https://git-lfs")
        require(not is_pointer, "it is a pointer of Git LFS: run git lfs pull in its folder")
        if address.lower().endswith(".parquet"):
            texts = read_parquet(file, template)
        else:
            texts = read_text(file, template, address)
        for text, begins, share in texts:
            if text is None:  # the row has none
                continue
            for part in [text] if len(text) <= BATCH_SIZE else cut(text):
                yield part, begins, share
                begins = False


def fetch(address: str) -> str:
    """Return the path of a file. One of the hub is downloaded, unless the user's cache has it."""
    if "://" not in address:
        return address
    import datasets

    with naming("the download failed, run the same command again"):
        return datasets.DownloadManager().download(address)


def fetch_ahead(address: str) -> None:
    """Download a file while another one is read."""
    with suppress(Exception):  # read_file fetches it again, and says what is wrong
        fetch(address)


def read_parquet(file: io.BufferedIOBase, template: list[tuple]) -> Iterator[tuple]:
    """Yield (text or None, True, share of the rows that were read) of a .parquet file."""
    from pyarrow import parquet

    # 4 MB at a time, where pre_buffer would read the column of the whole file
    table = parquet.ParquetFile(file, buffer_size=2**22, pre_buffer=False)
    found = table.schema_arrow.names
    columns = [key for _, key in template if key is not None]
    require({*columns} <= {*found}, f"expected the columns {columns} (--text_key), found {found}")
    batches = table.iter_batches(128, columns=columns)  # ~0.6 MB of FineWeb each
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        text = make_text(template, row, f"row {number}")
        # The place in the file is no share, because other columns may follow all texts
        yield text, True, number / table.metadata.num_rows


def read_text(file: io.BufferedReader, template: list[tuple], address: str) -> Iterator[tuple]:
    """Yield (text or None, whether it begins a document, share that was read) of another file."""
    size = os.path.getsize(file.name)
    content = file
    stem, ending = os.path.splitext(address.lower())
    if ending == ".zst":
        import pyarrow  # unlike zstandard's, its stream notices a truncated file

        content = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    elif ending in (".gz", ".xz"):
        content = {".gz": gzip.open, ".xz": lzma.open}[ending](file)
    if content is not file:
        ending = os.path.splitext(stem)[1]  # .csv of .csv.gz
    start = content.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n")  # peek(1) returns 8 KB
    is_binary = b"\0" in start or start.startswith((b"%PDF", b"{\\rtf", b"\xff\xfe", b"\xfe\xff"))
    require(not is_binary, "it is packed, a document, a picture or UTF-16 (see .github/HELP.md)")
    lines = io.TextIOWrapper(content, "utf-8-sig")  # no byte order mark, and \n as line ends
    with lines, naming("it is no UTF-8 (iconv: see .github/HELP.md)", UnicodeDecodeError):
        if ending in (".csv", ".tsv"):
            texts = read_csv(lines, template, ending)
        # JSON has many names, such as .jl, .ldjson or wiki_00, so its beginning counts, too
        elif ending.startswith((".json", ".ndjson")) or re.match(rb'\{\s*"', start):
            texts = read_json(lines, template, start)
        else:
            texts = read_txt(lines)
        for text, begins in texts:
            yield text, begins, file.tell() / size


def read_txt(lines: io.TextIOWrapper) -> Iterator[tuple]:
    """Yield (part, whether it begins a document), because a document may not fit in the memory.

    "One.<|endoftext|>\\nTwo.\\n<|endoftext|>\\n" holds the documents "One." and "Two.\\n"."""
    separator = f"{EOT}\n"
    text = ""  # what was read, but not yielded yet
    begins = True  # whether the next part begins a document
    at_end = False
    while not at_end:
        block = lines.read(BATCH_SIZE)
        at_end = not block
        if at_end:  # which ends a document, too
            block = separator
            text = text.removesuffix(EOT)
        *ends, text = (text + block).split(separator)
        for end in ends:
            if end.strip() or not begins:  # no blank documents
                yield end, begins
            begins = True
        # The last characters wait: they may begin a separator, which the next block completes
        *parts, last = cut(text[: -len(EOT)])
        for part in parts:
            yield part, begins
            begins = False
        text = last + text[-len(EOT) :]


def read_json(lines: io.TextIOWrapper, template: list[tuple], start: bytes) -> Iterator[tuple]:
    """Yield the texts of a file with a record on each line, or with one array or record in all."""
    if re.match(rb"\[|\{\s*[\r\n]", start):  # an array, or a record on several lines
        with naming("expected a record on each line, or all in one array", json.JSONDecodeError):
            whole = json.load(lines)
        records = whole if isinstance(whole, list) else [whole]
    else:
        parse = json.JSONDecoder().decode  # json.loads takes longer for short lines
        records = (None if line.isspace() else parse(line) for line in lines)
    number = 0
    try:
        for number, record in enumerate(records, 1):
            text = None if record is None else make_text(template, record, f"row {number}")
            if text and not text.isascii():
                # JSON can spell half of a surrogate pair, which UTF-8 cannot: it becomes U+FFFD
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            yield text, True
    except json.JSONDecodeError as error:
        raise UserError(f"row {number + 1} is no JSON: {error}") from error


def read_csv(lines: io.TextIOWrapper, template: list[tuple], ending: str) -> Iterator[tuple]:
    """Yield the texts of a .csv or .tsv file. The first line names the columns."""
    csv.field_size_limit(2**31 - 1)  # characters of a cell
    if ending == ".tsv":  # where a quote is a character like others
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        advice = "a cell has no tabs and no line ends"
    else:  # strict refuses an open quote, which would take all behind it
        rows = csv.reader(lines, strict=True, skipinitialspace=True)
        advice = "a cell with commas stands in quotes, and a quote in it is written twice"
    names = next(rows, [])
    line = 2  # where the row begins
    try:
        for cells in rows:
            # A line may be blank, or the header again, where files were joined
            if cells and cells != names:
                if len(cells) != len(names):
                    raise csv.Error(f"found {len(cells)} cells, expected {len(names)}")
                row = dict(zip(names, [cell or None for cell in cells], strict=True))
                yield make_text(template, row, f"row in line {line}"), True
            line = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"row in line {line}: {error} ({advice})") from error


def split_key(text_key: str) -> list[tuple]:
    """Return --text_key as its keys, each with the characters before it.

    "text" is [("", "text")], and "Q: {q}\\n{a}." is [("Q: ", "q"), ("\\n", "a"), (".", None)]."""
    if "{" not in text_key:
        return [("", text_key)]
    pieces = Formatter().parse(text_key.replace("\\n", "\n"))  # not each shell has line ends
    return [(before, key) for before, key, *_ in pieces]


def make_text(template: list[tuple], row: object, where: str) -> str | None:
    """Return the text of a row. It is None if the row has a value for none of the keys."""
    text = ""
    is_empty = True
    for before, key in template:
        text += before
        if key is None:
            continue
        if not isinstance(row, dict) or key not in row:
            found = list(row) if isinstance(row, dict) else row
            raise UserError(f"{where}: expected the key {key!r} (--text_key), found {found!r:.200}")
        value = row[key]
        if isinstance(value, str):
            text += value
            is_empty = False
        elif value is not None and value == value:  # NaN, which pandas writes, is not itself
            raise UserError(f"{where}: expected a text as {key!r} (--text_key), found {row!r:.99}")
    return None if is_empty else text


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


# ---- from texts to tokens ------------------------------------------------------------------------


def choose_tokenizer(args: Namespace, files: dict[str, list]) -> str:
    """Return what get_tokenizer takes: a name, the tokenizer of other shards, or a new one."""
    if args.tokenizer.isdecimal():
        if args.dataset:  # all files of the hub may be hundreds of GB: the first one must do
            files = dict(islice(files.items(), 1))
        return train_tokenizer(files, args.text_key, int(args.tokenizer))
    if args.tokenizer in ("gpt2", "bytes"):
        return args.tokenizer
    path = Path(args.tokenizer, "meta.json")
    with naming(f"--tokenizer {args.tokenizer}: expected gpt2, bytes, a size or shards"):
        tokenizer = json.loads(path.read_bytes())["tokenizer"]
        get_tokenizer(tokenizer)
    return tokenizer


def sample_texts(files: dict[str, list], text_key: str) -> Iterator[str]:
    """Yield all texts or, of more than SAMPLE_SIZE bytes, a sample that is spread over all."""
    total = sum(size for size, _ in files.values())
    read = 0  # bytes of whole files
    taken = 0
    for address, (size, _) in files.items():
        for text, _, share in read_file(address, text_key):
            # The sample has no more than its share of what was read
            if taken <= SAMPLE_SIZE * (read + size * share) / total:
                taken += len(text.encode())
                yield text
        read += size


def train_tokenizer(files: dict[str, list], text_key: str, size: int) -> str:
    """Return a byte-level BPE tokenizer: its name, then its tokens beyond the bytes, in hex."""
    from tokenizers import Regex, Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    print(f"training a tokenizer of {size} tokens from {SAMPLE_SIZE >> 20} MiB at most", flush=True)
    bpe = Tokenizer(models.BPE())
    words = Split(Regex(WORD), "isolated")
    bpe.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = sorted(ByteLevel.alphabet())  # of 256 characters, which stand for the bytes
    rest = {"initial_alphabet": alphabet, "min_frequency": 2, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size - 1, **rest)  # <|endoftext|> is the last one
    bpe.train_from_iterator(sample_texts(files, text_key), trainer)
    # Visible bytes stand for themselves, and characters from U+0100 on for the others, in order
    visible = [ord(c) for c in alphabet if c < "\u0100"]
    invisible = sorted({*range(256)} - {*visible})
    byte_of = dict(zip(alphabet, visible + invisible, strict=True))
    vocabulary = bpe.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)[256:]
    count = len(tokens) + 257
    if count < size:
        print(f"it has only {count}, because no other two tokens follow each other twice in words")
    tokens = " ".join(bytes(byte_of[c] for c in token).hex() for token in tokens)
    digest = hashlib.sha256(tokens.encode()).hexdigest()
    return f"bpe-{count}-{digest[:6]} {tokens}"


class Position(NamedTuple):
    """A place in all files, behind one of their texts: where a run that was stopped goes on."""

    file: int = 0  # index of the file
    texts: int = 0  # texts of this file before the place; each part of a long one counts
    digest: str = hashlib.sha256().hexdigest()  # SHA-256 of those texts; at first of none
    marks: int = 0  # <|endoftext|> found inside texts, from the first file on


def read_batches(args: Namespace, files: dict[str, list], start: Position) -> Iterator[tuple]:
    """Yield (position behind a batch, share of all files read, batch) from a position on."""
    addresses = list(files)
    require(start.file < len(files), f"the file behind {addresses[-1]} is missing: {ADVICE}")
    sizes = [size for size, _ in files.values()]
    total = sum(sizes)
    read = sum(sizes[: start.file])  # bytes of whole files
    marks = start.marks
    batch = []
    length = 0  # of the batch, in characters
    for k in range(start.file, len(files)):
        # --max_tokens may be reached before the next file is needed
        if args.dataset and not args.max_tokens and k + 1 < len(files):
            Thread(target=fetch_ahead, args=(addresses[k + 1],), daemon=True).start()
        texts = enumerate(read_file(addresses[k], args.text_key), 1)
        digest = hashlib.sha256()
        if k == start.file:  # its first texts are in a shard already, and must be as they were
            for _, (text, begins, _) in islice(texts, start.texts):
                digest.update(f"{begins}{text}\0".encode())
            is_same = digest.hexdigest() == start.digest
            require(is_same, f"{addresses[k]} has changed where it was read already: {ADVICE}")
        for number, (text, begins, share) in texts:
            digest.update(f"{begins}{text}\0".encode())
            marks += text.count(EOT)
            batch.append((text, begins))
            length += len(text) + 1  # so that documents without a character count, too
            if length >= BATCH_SIZE:
                end = Position(k, number, digest.hexdigest(), marks)
                yield end, (read + share * sizes[k]) / total, batch
                batch = []
                length = 0
        read += sizes[k]
    yield Position(len(files), marks=marks), 1.0, batch


def cut(text: str) -> Iterator[str]:
    """Yield a text in parts of up to BATCH_SIZE characters: tiktoken fails at a million blanks."""
    start = 0
    while len(text) - start > BATCH_SIZE:
        end = start + BATCH_SIZE  # DNA or a million blanks have no good place to cut
        if found := UNTIL_BREAK.match(text, start, end):
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


def encode(enc: tiktoken.Encoding, batch: list[tuple]) -> np.ndarray:
    """Return the tokens of a batch."""
    together = "".join([EOT * begins + text for text, begins in batch])
    if together.count(EOT) == sum(begins for _, begins in batch):  # the texts themselves have none
        # In one call, because a thread waits for Python's lock at the end of each
        return enc.encode_to_numpy(together, allowed_special="all").astype("<u2")
    # A text quotes <|endoftext|>, which is encoded like other characters, and not as the token
    tokens = []
    for text, begins in batch:
        tokens += [[enc.eot_token] * begins, enc.encode_to_numpy(text, disallowed_special=())]
    return np.concatenate(tokens, dtype="<u2", casting="unsafe")


def tokenize(batches: Iterator[tuple], tokenizer: str, workers: int) -> Iterator[tuple]:
    """Yield (position, share, tokens) of all batches, in order, encoded by this many threads."""
    own = local()  # each thread sees its own attributes

    def encode_in_thread(batch: list[tuple]) -> np.ndarray:
        if not hasattr(own, "enc"):
            own.enc = get_tokenizer(tokenizer)
        return encode(own.enc, batch)

    with ThreadPoolExecutor(workers) as pool:  # tiktoken encodes without Python's lock
        tasks = ((*place, pool.submit(encode_in_thread, batch)) for *place, batch in batches)
        waiting = deque(islice(tasks, 4 * workers))  # few, as tokens must not fill the memory
        while waiting:
            position, share, tokens = waiting.popleft()
            waiting.extend(islice(tasks, 1))
            yield position, share, tokens.result()


# ---- from tokens to shards -----------------------------------------------------------------------
# A chunk is about --shard_size tokens, ends where a batch ends, and becomes a shard of each split:
#     files      |        a.jsonl        |        b.jsonl        |        c.txt ...
#     batches    |      |      |      |      |      |      |      |
#     chunks     |          0         |          1         |  <- the position behind chunk 1
#     shards       train_000000.npy     train_000001.npy
#                  val_000000.npy       val_000001.npy
# After each chunk, meta.json lists its shards and the position behind it, where the same command
# reads on after a kill. What was read must not change: whole files, and texts before the position.


def write_shards(args: Namespace, meta: dict) -> None:
    """Write the shards of all chunks from the position in meta.json on."""
    if not meta["shards"]:  # the folder is tried before hours of work
        os.makedirs(os.path.realpath(args.out), exist_ok=True)  # also where a link leads nowhere
        write_file(f"{args.out}/meta.json", json.dumps(meta, indent=1).encode())
    saving = None  # the work of a thread, which writes a chunk while the next one is filled
    with ThreadPoolExecutor(1) as writer:
        for chunk, position, done in fill_chunks(args, meta):
            if saving:
                saving.result()  # waits, and raises what went wrong
            saving = writer.submit(save_chunk, args, meta, chunk, position, done)
        saving.result()


def fill_chunks(args: Namespace, meta: dict) -> Iterator[tuple]:
    """Yield (chunk as a list of arrays, position behind it, whether it is the last one)."""
    position = meta["progress"]["position"]
    batches = read_batches(args, meta["files"], position)
    total = count_tokens(meta)  # so far
    budget = args.max_tokens or sys.maxsize
    chunk = []
    stream = sys.stderr or io.StringIO()  # a service has none. Only a terminal shows the bar
    with tqdm(initial=total, unit=" tokens", unit_scale=True, file=stream, disable=None) as bar:
        for end, share, tokens in tokenize(batches, meta["tokenizer"], args.workers):
            if sum(map(len, chunk)) >= args.shard_size:  # and another batch follows
                yield chunk, position, False
                chunk = []
            chunk.append(tokens[: budget - total])
            position = end
            total += len(chunk[-1])
            bar.total = min(budget, round(total / share))  # about, if it is not the budget
            bar.update(total - bar.n)
            if total == budget:
                break
    yield chunk, position, True


def save_chunk(args, meta: dict, chunk: list[np.ndarray], position: Position, done: bool) -> None:
    """Write a shard of each split, then meta.json with the position behind the chunk."""
    chunks = meta["progress"]["chunks"]
    tokens = np.concatenate(chunk)
    is_val = choose_validation(args, meta, len(tokens))
    for split, chosen in (("val", is_val), ("train", ~is_val)):
        name = f"{split}_{chunks:06d}.npy"
        if chosen.any():
            shard = io.BytesIO()
            np.save(shard, tokens[chosen])
            write_file(f"{args.out}/{name}", shard.getvalue())
            sha256 = hashlib.sha256(shard.getvalue()).hexdigest()
            meta["shards"][name] = {"tokens": int(chosen.sum()), "sha256": sha256}
        else:  # a killed run may have left one, if other texts came next
            Path(args.out, name).unlink(missing_ok=True)
    meta["progress"] = {"chunks": chunks + 1, "position": position, "done": done}
    write_file(f"{args.out}/meta.json", json.dumps(meta, indent=1).encode())


def choose_validation(args: Namespace, meta: dict, size: int) -> np.ndarray:
    """Return the mask of the validation tokens among the next `size` tokens."""
    # All tokens are cut into pieces. Of the first n pieces, validation gets n * val_share, rounded.
    # So it gets each piece with which this number rises. With a share of 0.3:
    #     before the piece     0 0 1 1 1 2 2 2 2 3 ...
    #     with the piece       0 1 1 1 2 2 2 2 3 3 ...
    #     it is validation's   . x . . x . . . x . ...
    piece_size = meta["piece_size"]
    start = count_tokens(meta)
    pieces = np.arange(start // piece_size, (start + size) // piece_size + 2)  # 1 more for diff
    is_val = np.diff(np.floor(pieces * args.val_share + 0.5)) > 0
    is_val = np.repeat(is_val, piece_size)[start % piece_size :][:size]
    excess = count_tokens(meta, "val") + int(is_val.sum()) - args.val_tokens
    if excess > 0:
        is_val[np.flatnonzero(is_val)[-excess:]] = False
    return is_val


def count_tokens(meta: dict, split: str = "") -> int:
    """Return how many tokens the finished shards of a split, or all of them, have."""
    return sum(shard["tokens"] for name, shard in meta["shards"].items() if split in name)


def find_meta(args: Namespace) -> dict:
    """Return meta.json as an earlier start of the same run has left it, or a new one."""
    changeable = ("files", "paths", "out", "workers")  # the files' content is compared instead
    options = {flag: value for flag, value in vars(args).items() if flag not in changeable}
    if list(Path(args.out).glob("*.npy")):
        return check_meta(args, options)
    files = list_files(args)
    tokenizer = choose_tokenizer(args, files)
    enc = get_tokenizer(tokenizer)
    is_small = sum(size for size, _ in files.values()) < 2**24  # bytes
    return {
        "tokenizer": tokenizer,  # this and the next two are for the trainer
        "vocab_size": enc.n_vocab,
        "eot": enc.eot_token,
        "version": META_VERSION,
        "options": options,
        # Tokens that go to validation together: longer pieces cut fewer windows of 1,024 in two
        "piece_size": 512 if is_small else 8192,
        "shards": {},  # {name: {"tokens": count, "sha256": hexadecimal}}
        "progress": {"chunks": 0, "position": Position(), "done": False},
        "files": files,
    }


def check_meta(args: Namespace, options: dict) -> dict:
    """Return the meta.json of a run, after a check that nothing has changed since."""
    path = Path(args.out, "meta.json")
    require(path.exists(), f"{args.out} holds shards, but no meta.json: choose another --out")
    with naming(f"{path} cannot be read", OSError):
        content = path.read_bytes()
    with naming(f"{path} is damaged: delete the folder to start over"):
        meta = json.loads(content)
        is_same = meta.get("version") == META_VERSION
    require(is_same, f"another version of fineweb.py made {args.out}: train with it, or delete it")
    for flag, value in options.items():
        before = meta["options"].get(flag)
        require(before == value, f"{path} has {flag} {before}, not {value}: {ADVICE}")
    meta["progress"]["position"] = Position(*meta["progress"]["position"])
    if args.files:  # those of a dataset stay as they were at the beginning
        files = list_files(args)
        # The rest may change: a broken row is mended. read_batches checks the file at the position
        end = None if meta["progress"]["done"] else meta["progress"]["position"].file
        before = list(meta["files"].items())[:end]
        now = list(files.items())[:end]
        for (old_name, old), (name, new) in zip_longest(before, now, fillvalue=("nothing", None)):
            require(old == new, f"{name} (before: {old_name}) is new, missing or changed: {ADVICE}")
        meta["files"] = files
    for name, shard in meta["shards"].items():
        path = Path(args.out, name)
        with naming(f"{path} cannot be read", OSError):
            content = path.read_bytes() if path.exists() else b""
        is_same = hashlib.sha256(content).hexdigest() == shard["sha256"]
        require(is_same, f"{path} is missing or has changed: put it back, or delete the folder")
    return meta


# ---- command line --------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Run a command line. Without one, run that of the process, and say what to run next."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may hold what a console cannot print
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        meta = find_meta(args)
        if meta["progress"]["done"]:
            print(f"{args.out} is made already")
        else:
            print(f"making {args.out}: if interrupted, the same command continues", flush=True)
            write_shards(args, meta)
        for path in Path(args.out).glob("*.unfinished"):  # of killed processes
            with suppress(OSError):  # Windows deletes no file that another one is writing
                path.unlink()
        report(args, meta, argv)
    except (UserError, OSError) as error:
        print("fineweb.py:", *str(error).split(), file=sys.stderr)  # all its lines as one
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 plus SIGINT's number


def parse_args(argv: list[str]) -> Namespace:
    """Parse the command line, and fill in the defaults that depend on other options."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, message)  # one line, not argparse's several
    add = parser.add_argument
    add("--dataset", help=f"name on the Hugging Face hub (default {FINEWEB}), or pydocs")
    add("--name", help="configuration of the dataset (default for FineWeb: sample-10BT)")
    add("--files", nargs="+", action="extend", default=[], metavar="PATH", help="files, folders")
    add("paths", nargs="*", metavar="PATH", help="the same: files, folders, globs")
    add("--text_key", default="text", help='key or column of the texts, or "{title}\\n{body}"')
    add("--tokenizer", help="gpt2 (default), bytes, a size to train one, or shards that have one")
    add("--out", help="folder of the shards (default edu_fineweb10B or pydocs)")
    add("--shard_size", type=int, default=10**8, help="tokens of train + val shard (default 100M)")
    add("--max_tokens", type=int, help="stop after this many tokens")
    add("--val_tokens", type=int, help="for validation (default: shard_size or max_tokens / 10)")
    add("--val_share", type=float, help="share for validation, up to val_tokens (0.1; FineWeb: 1)")
    add("--workers", type=int, help="threads (default: 1 per core)")
    words = []
    for word in argv:  # --max-tokens=5 means --max_tokens=5
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        words.append(name + equals + value)
    args = parser.parse_intermixed_args(words)
    args.files = [os.path.expanduser(path) for path in args.files + args.paths]
    with naming(f"--text_key {args.text_key}: a brace that is no key's is written {{{{ or }}}}"):
        require(any(key is not None for _, key in split_key(args.text_key)), "there is no key")
    require(not (args.files and args.dataset), "--files and --dataset are two sources: choose one")
    args.dataset = args.dataset or (None if args.files else FINEWEB)
    args.name = args.name or {FINEWEB: "sample-10BT"}.get(args.dataset)
    args.out = args.out or FOLDERS.get((args.dataset, args.name))
    require(args.out, "--out FOLDER is needed: where do the shards go?")
    args.out = os.path.normpath(os.path.expanduser(args.out))  # without a slash at the end
    args.tokenizer = args.tokenizer or {"pydocs": "2048"}.get(args.dataset, "gpt2")
    args.tokenizer = os.path.expanduser(args.tokenizer)  # no shell does it behind a =
    if args.tokenizer.isdecimal():
        require(257 < int(args.tokenizer) <= 65536, "--tokenizer: expected 258 to 65536 tokens")
    if args.workers is None:  # a job may use some of the cores only
        is_limited = hasattr(os, "sched_getaffinity")
        args.workers = len(os.sched_getaffinity(0)) if is_limited else os.cpu_count()
    if args.val_share is None:  # unlike FineWeb, other data may be sorted
        args.val_share = {FINEWEB: 1.0}.get(args.dataset, 0.1)
    require(0 <= args.val_share <= 1, "--val_share is a number from 0 to 1")
    if args.val_tokens is None:
        args.val_tokens = min(args.shard_size, (args.max_tokens or 10 * args.shard_size) // 10)
        if args.files and args.val_share == 1:
            args.val_tokens = sys.maxsize  # the files are a text to test a model with
    for flag, least in (("shard_size", 1), ("max_tokens", 1), ("workers", 1), ("val_tokens", 0)):
        value = getattr(args, flag)
        require(value is None or value >= least, f"--{flag} {value}: expected {least} or more")
    return args


def report(args: Namespace, meta: dict, argv: list[str] | None) -> None:
    """Print what was made and, to a user of the command line, what to run next."""
    train = count_tokens(meta, "train")
    val = count_tokens(meta, "val")
    require(train + val, "no tokens: the files have no text")
    largest = max(Path(args.out).glob("*.npy"), key=os.path.getsize)
    tokens = np.load(largest, mmap_mode="r")[: 10**6]
    text = get_tokenizer(meta["tokenizer"]).decode(tokens.tolist())
    token_size = len(text.replace(EOT, "").encode()) / len(tokens)
    print(f"{train:,} tokens to train and {val:,} to validate, of {token_size:.2f} bytes each")
    if marks := meta["progress"]["position"].marks:
        print(f"{marks:,} {EOT} inside texts end no document: they are read as characters")
    if args.tokenizer == "gpt2" and token_size < 3:  # English has 3.4 to 4.6
        print("GPT-2's tokens fit these texts badly: add --tokenizer 16384 (a CPU: 2048) and --out")
    if 0 < train * token_size < 10**5:  # bytes: of 120 KB, validation has a tenth
        print("this is too little to learn from: a model needs 120 KB of text or more")
    elif argv is None:
        # The words that begin a document, without what means something to a shell
        before, *documents = text.split(EOT)
        document = next(filter(str.strip, documents), before)
        words = re.sub(r"[\"$%!`\\]", " ", document[:200]).split()
        print(suggest(args, meta, train, val, " ".join(words[:2])[:20].rstrip()))


def suggest(args: Namespace, meta: dict, train: int, val: int, prompt: str) -> str:
    """Return the next commands, which suit the number of tokens to train:

    none            the loss of a model that reads these tokens
    below 100M      a CPU: the quickstart's model, four epochs, but 800 to 4,000 steps
                    a GPU: a small model, four epochs. If the tokens are GPT-2's, OpenAI's model
    below 2.5B      a GPU: GPT-2 by Muon, four epochs of own files, one of a dataset of the hub
    2.5B or more    a GPU: GPT-2 by AdamW, at three times GPT-3's rate"""
    # Double quotes, because Windows' cmd.exe knows no others
    quote = "" if re.fullmatch(r"[\w:+=,./\\-]+", args.out) else '"'
    command = f"python train_gpt2.py --data_dir {quote}{args.out}{quote}"
    if train == 0:
        log = f"log/{Path(args.tokenizer).name}"  # of the model whose shards gave the tokenizer
        if not os.path.isdir(log):
            log = "log"
        command += f' --init_from "{log}" --max_steps 0 --val_tokens {val}'
        return f"next, for a model in {log} that reads these tokens:\n{command}"
    command += f" --log_dir {quote}log/{Path(args.out).resolve().name}{quote}"
    if val <= 1024:  # the longest window
        command += " --val_tokens 0"
    if train >= 2.5e9:
        if args.out == FOLDERS[FINEWEB, "sample-10BT"]:
            command = "python train_gpt2.py"  # which reads this folder by default
        return f"next, on a GPU:\n{command} --max_lr 1.8e-3"
    if args.dataset != FINEWEB:  # for which the default prompt is made
        command += f' --prompt="{prompt}"'
    if train >= 10**8:
        epochs = 1 if args.dataset else 4
        steps = int((epochs * train / 27.5) ** 0.5)  # n steps read about 27.5 * n**2 tokens
        if args.dataset:
            steps = steps // 1000 * 1000
        return f"next, on a GPU:\n{command} --optimizer muon --max_steps {steps}"
    epochs = 4
    model = "--optimizer muon --model d6 --seq_len 256"
    if meta["tokenizer"] == "gpt2":
        epochs = 3
        model = "--init_from gpt2"  # which knows English already
    steps = epochs * train // 16384 + 1
    on_gpu = f"{command} {model} --total_batch_size 16384 --max_steps {steps}"
    on_gpu += f" --val_every {steps // 10 + 1}"  # to see when the texts are learnt by heart
    if meta["vocab_size"] > 2**13:
        return f"next, on a GPU (a CPU needs --tokenizer 2048, and another --out):\n{on_gpu}"
    # Two cores make 4,000 steps, of 1,024 tokens each, in ten minutes. The quickstart makes 800
    steps = min(max(800, 4 * train // 1024), 4000)
    on_cpu = f"{command} --quickstart --max_steps {steps} --val_every {steps // 10 + 1}"
    if val > 1024:  # all of it, if possible, because it is in the order of the files
        on_cpu += f" --val_tokens {min(val, 500_000)}"
    return f"next, on a CPU (a small model, in minutes):\n{on_cpu}\nor, on a GPU:\n{on_gpu}"


if __name__ == "__main__":
    main()
