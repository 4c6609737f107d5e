"""The files of ``shardwright render`` as YAML text, readable for people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

Files = dict[str, list[dict[str, Any]]]
"""The documents of each file, by file name."""


def write(files: Files, out: Path) -> None:
    """Write `files` (documents by file name) as YAML into the folder `out`, which is created if needed, and print each path on
    stderr. Existing files are overwritten. Raises `OSError`."""
    out.mkdir(parents=True, exist_ok=True)
    for name, documents in files.items():
        (out / name).write_text(text_of(documents))
        print(f"wrote {out / name}", file=sys.stderr)


def text_of(documents: list[dict[str, Any]]) -> str:
    """Returns plain `documents` as YAML text, one after the other, with texts of several lines as blocks."""
    return yaml.dump_all(documents, Dumper=_Blocks, sort_keys=False, width=120, allow_unicode=True)


class _Blocks(yaml.SafeDumper):
    """YAML dumper that writes texts of several lines as blocks, and repeated values in full, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """See `yaml.SafeDumper.ignore_aliases`. Returns True: no value is written as an alias."""
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _block)
