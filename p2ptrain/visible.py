"""Formats numbers for people, and makes untrusted text safe to print: a file name or a message can hold terminal
control sequences, a line break that forges another line, or bytes that are not text."""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """Returns the text with unprintable characters escaped (as \\x1b), except those in `keep`."""
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def one_line(text: str, most: int) -> str:
    """Returns a line of at most so many characters, without control characters and changes of direction."""
    return "".join(each for each in " ".join(text.split()) if each.isprintable())[:most]


def count_of(size: float) -> str:
    """Formats a number of bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1_000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1_000
    raise AssertionError("the last unit takes all")


def few(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"
