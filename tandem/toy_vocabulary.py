"""The alphabet of the built-in vocabulary that needs no files."""

import string

_SMALL_ALPHABET = string.ascii_lowercase + " " + string.ascii_uppercase + string.digits + string.punctuation + "\n"
_FURTHER_LETTERS = 0x100  # Latin letters of two bytes each continue the small alphabet


def toy_bytes_table(vocab_size: int) -> tuple[bytes, ...]:
    """The table id -> bytes of `vocab_size` ids, the last of which is the end of sequence (no bytes).

    From 256 ids on, id b is the single byte b (with exactly 256, byte 0xFF is missing, which UTF-8 never uses)
    and an id past 255 is the text `<id>`. Fewer ids are one character each: letters, space, digits, punctuation.
    """
    if vocab_size < 2:
        raise ValueError(f"a toy vocabulary has at least 2 ids, not {vocab_size}")
    num_tokens = vocab_size - 1
    if vocab_size >= 256:
        single = [bytes([byte]) for byte in range(256)]
        table = [*single, *(f"<{token_id}>".encode() for token_id in range(256, num_tokens))][:num_tokens]
    else:
        further = [chr(_FURTHER_LETTERS + n) for n in range(256)]
        table = [character.encode() for character in [*_SMALL_ALPHABET, *further][:num_tokens]]
    return (*table, b"")


def encode_toy(text: str, table: tuple[bytes, ...]) -> list[int]:
    """Ids of `text`, one a byte or one a character; raises `ValueError` naming a character the alphabet lacks."""
    if len(table) >= 256:
        return list(text.encode())
    ids = {token: token_id for token_id, token in enumerate(table[:-1])}
    unknown = next((character for character in text if character.encode() not in ids), None)
    if unknown is not None:
        raise ValueError(f"the toy vocabulary of {len(table)} ids has no character {unknown!r}")
    return [ids[character.encode()] for character in text]
