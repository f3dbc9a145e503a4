"""What the content of a file is, in 32 hex digits."""

from pathlib import Path
from typing import Final

_CHUNK_BYTES: Final = 8 << 20


def digest_of(path: Path) -> str:
    """The xxh3 128-bit digest of a file, in hex."""
    import xxhash  # 20 ms that the supervisor pays only where it adopts

    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return str(hasher.hexdigest())
