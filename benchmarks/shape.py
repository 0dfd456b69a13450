"""Counts what makes the package easy or hard to read: `python benchmarks/shape.py [DIRECTORY]`.

Lines with and without comments and docstrings, the classes with the most attributes, constructors with many arguments,
and where tests reach into privates. Run it in checkouts of two commits to compare them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ARGUMENTS, SHOWN = 8, 5


def code_lines(text: str) -> int:
    """Counts lines that hold more than comments and docstrings."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def classes(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, int, int]]:
    """Yields each class that has a constructor, with its attributes and the constructor's arguments."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            made = isinstance(node, ast.ClassDef) and next(
                (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None
            )
            if not made:
                continue
            names = {
                each.attr
                for each in ast.walk(made)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
            arguments = len(made.args.args) + len(made.args.kwonlyargs) - 1
            yield f"{path}:{node.name}", len(names), arguments


def privates(tree: ast.Module) -> int:
    """Counts accesses to privates of something else than self or cls."""
    return sum(
        isinstance(each, ast.Attribute)
        and each.attr.startswith("_")
        and not each.attr.startswith("__")
        and not (isinstance(each.value, ast.Name) and each.value.id in ("self", "cls"))
        for each in ast.walk(tree)
    )


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for part in ("p2ptrain", "tests"):
        texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / part).rglob("*.py"))}
        lines, code = sum(text.count("\n") for text in texts.values()), sum(map(code_lines, texts.values()))
        print(f"{part}: {len(texts)} files, {lines:,} lines, {code:,} without comments and docstrings")
        trees = {path.relative_to(root): ast.parse(text) for path, text in texts.items()}
        if part == "tests":
            reached = [count for tree in trees.values() if (count := privates(tree))]
            print(f"  {sum(reached)} accesses to privates in {len(reached)} files")
            continue
        made = sorted(classes(trees), key=lambda each: each[1], reverse=True)
        print("  most attributes: " + ", ".join(f"{name} {count}" for name, count, _ in made[:SHOWN]))
        many = [name for name, _, arguments in made if arguments >= ARGUMENTS]
        print(f"  constructors with {ARGUMENTS} arguments or more: {len(many)}")


if __name__ == "__main__":
    main()
