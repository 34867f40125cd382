"""Mutations of files that people write or that programs write for them: records, settings, reports, metrics."""

from __future__ import annotations

import gzip
import io
import json
import re

# What may stand in the place of a value: of JSON and YAML alike.
_JSON_VALUES = (
    b"null", b"true", b"-1", b"0.5", b"1e999", b"NaN", b"Infinity", b"9" * 400, b"7" * 5000, b'""', b'"x"', b"{}", b"[]",
    b"[" * 3000, b'{"a":' * 3000, b'"\\ud800"', b'"\\u0000"', b'[{"role": 3}]', b'{"role": "user"}', b"[[]]",
    b'"' + b"y" * 5000 + b'"',
    b'[{"role": "assistant", "content": null}]', b'[{"from": "gpt"}]', b"\xff", b"2 3",
)  # fmt: skip
_YAML_VALUES = (
    b"2001-99-99", b"0x" + b"f" * 6000, b"9" * 5000, b"&a [*a]", b"*nowhere", b"!!python/object/apply:os.getcwd []",
    b"!!binary aGk=", b".nan", b"-.inf", b"{[1]: 2}", b"? ", b"\t", b"{a: b", b"'", b"|\n x",
    b"!!set {a}", b"0o9", b"1:99:99",
)  # fmt: skip
_BILLION = b"a: &a [x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c]\n" % (at, at, at - 1, at - 1) for at in range(ord("b"), ord("z"))
)
_MERGED = b"a: &a {x: 1}\n" + b"".join(
    b"%c: &%c {<<: [*%c, *%c], k%d: 1}\n" % (at, at, at - 1, at - 1, at) for at in range(ord("b"), ord("z"))
)
_SCALAR = re.compile(rb'(?<=[:\[,] )("[^"]*"|-?[\d.e+-]+|null|true|false|[a-z_./]+)')


def mutated(draw, data: bytes, *, yaml: bool = False) -> bytes:
    """One mutation of a text file."""
    place = draw.randrange(len(data) + 1)
    kind = draw.choice(("flip", "cut", "insert", "repeat", "drop", "value", "value", "value", "whole"))
    if kind == "flip" and data:
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return (
            data[:place]
            + draw.choice((b"\0", b"\n", b'"', b"{", b"]", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\r"))
            + data[place:]
        )
    if kind == "repeat":
        return data[:place] + data[max(0, place - 200) : place] + data[place:]
    if kind == "drop":
        return data[:place] + data[place + draw.randrange(1, 60) :]
    if kind == "whole":
        choices = (b"", b"\n\n", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 50_000, b"\0" * 64, b'{"a":' * 20_000)
        return draw.choice((*choices, _BILLION, _MERGED, b"- " * 3000) if yaml else choices)
    values = _YAML_VALUES + _JSON_VALUES if yaml else _JSON_VALUES
    scalars = list(_SCALAR.finditer(data))
    if not scalars:
        return data[:place] + draw.choice(values) + data[place:]
    scalar = draw.choice(scalars)
    return data[: scalar.start()] + draw.choice(values) + data[scalar.end() :]


def data_files() -> dict[str, bytes]:
    """A small file of each kind of record and of format, by name."""
    records = {
        "text": [{"text": f"Document {i}, of some length. " * 3} for i in range(6)],
        "alpaca": [{"instruction": f"Add {i}.", "input": "one" * (i % 2), "output": f"{i + 1}"} for i in range(6)],
        "pairs": [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(6)],
        "chat": [
            {"messages": [{"role": "user", "content": f"Hello {i}"}, {"role": "assistant", "content": "Hi."}]}
            for i in range(6)
        ],
        "sharegpt": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 3,
    }
    files = {}
    for name, rows in records.items():
        files[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files["list.json"] = json.dumps(records["text"], indent=1).encode()
    files["plain.txt"] = "".join(f"Line {i} of a text: \u00fc\u2028\n" for i in range(20)).encode()
    files["rows.raw"] = b" = A title = \n\n A paragraph . \n" * 9
    files["packed.jsonl.gz"] = gzip.compress(files["text.jsonl"])
    files.update(_columnar(records["text"]))
    return files


def _columnar(rows) -> dict[str, bytes]:
    """Parquet, Arrow and zst, where pyarrow is there."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return {}
    table, parquet, arrow, packed = pyarrow.Table.from_pylist(rows), io.BytesIO(), io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet)
    with pyarrow.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        stream.flush()
        stream.close()
        zst = packed.getvalue() if not packed.closed else b""
    files = {"rows.parquet": parquet.getvalue(), "rows.arrow": arrow.getvalue()}
    return files | ({"packed.jsonl.zst": zst} if zst else {})
