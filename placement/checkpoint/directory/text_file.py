"""Text files as editors write them: with or without a byte order mark, with line ends of any system."""

from __future__ import annotations

import codecs
from pathlib import Path


def read_text(file: Path) -> str:
    """Returns the text of `file`, which is UTF-8, or UTF-16 if it begins with that encoding's byte order mark. The text has no
    byte order mark, and every line end is a newline.

    Raises `OSError` if the file cannot be read, and `UnicodeDecodeError` (a `ValueError`) if it is in another encoding.
    """
    with file.open("rb") as opened:
        is_utf16 = opened.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return file.read_text(encoding="utf-16" if is_utf16 else "utf-8-sig")
