"""Texts that are compared with what a person has read and found right; HIGGSFIELD_WRITE_TEXTS=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

TOLD = Path(__file__).with_name("told")


def assert_told(name: str, text: str) -> None:
    """`text` is what told/NAME.txt holds."""
    path = TOLD / f"{name}.txt"
    if os.environ.get("HIGGSFIELD_WRITE_TEXTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
