"""The byte alphabet of GPT-2: every byte has a printable character, so any byte string can be a vocabulary entry."""

from __future__ import annotations


def alphabet() -> dict[str, int]:
    """Returns GPT-2's byte alphabet: the byte (0 to 255) of each of its 256 characters. Printable bytes stand for themselves;
    the others have the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return table


ALPHABET = alphabet()


def to_bytes(token: str) -> bytes:
    """Returns the bytes that `token`, a vocabulary entry of byte-level BPE, stands for. An entry with characters outside the
    alphabet is plain text, and gives its UTF-8."""
    if all(character in ALPHABET for character in token):
        return bytes(ALPHABET[character] for character in token)
    return token.encode()


def from_bytes(data: bytes) -> str:
    """Returns the vocabulary entry of byte-level BPE that stands for `data`: one character of the alphabet for each byte."""
    characters = {byte: character for character, byte in ALPHABET.items()}
    return "".join(characters[byte] for byte in data)
