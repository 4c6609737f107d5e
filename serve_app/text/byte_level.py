"""The byte alphabet of GPT-2: every byte has a printable character, so any byte string can be a vocabulary entry."""

from __future__ import annotations


def alphabet() -> dict[str, int]:
    """Returns the byte of each character. Printable bytes stand for themselves; the others have the characters from U+0100 on,
    in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return table


ALPHABET = alphabet()


def to_bytes(token: str) -> bytes:
    """Returns the bytes that a vocabulary entry stands for. An entry with characters outside the alphabet is plain text."""
    if all(character in ALPHABET for character in token):
        return bytes(ALPHABET[character] for character in token)
    return token.encode()


def from_bytes(data: bytes) -> str:
    """Returns the vocabulary entry that stands for `data`."""
    characters = {byte: character for character, byte in ALPHABET.items()}
    return "".join(characters[byte] for byte in data)
