"""The files of ``shardwright render`` as text: YAML that a person reads, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

Files = dict[str, list[dict[str, Any]]]
"""Documents of each file, by its name."""


def write(files: Files, out: Path) -> None:
    """Write them into the folder `out`, which is made. Raises `OSError`."""
    out.mkdir(parents=True, exist_ok=True)
    for name, documents in files.items():
        (out / name).write_text(text_of(documents))
        print(f"wrote {out / name}", file=sys.stderr)


def text_of(documents: list[dict[str, Any]]) -> str:
    """Documents as YAML, long texts as blocks."""
    return yaml.dump_all(documents, Dumper=_Blocks, sort_keys=False, width=120, allow_unicode=True)


class _Blocks(yaml.SafeDumper):
    """Texts of several lines are written as they are; what is used twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _block)
