"""The alphabet of byte-level BPE: one printable character for each of the 256 bytes."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _alphabet() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes that ``token``, a string of the vocabulary, adds to the text.

    A token with a character outside the alphabet (a control token) stands for itself, as in the ``tokenizers`` decoder.
    """
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
