"""Texts that may be somebody else's, made fit for a terminal: a file's name or a message can hold what a terminal
obeys, a line break that forges another line, or bytes that are no text."""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """The text with each character written out (as in \\x1b) that cannot be seen, but for those to keep."""
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)
