"""The lessons, in README's order: its table is the one list of them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| \[`[^`]*`\]\(((?:more/)?(\w+)\.py)\) \| (.+) \|$", re.M)


def lessons():
    """{name: its path relative to the checkout}."""
    return {name: path for path, name, _ in ROW.findall((ROOT / "README.md").read_text())}


def path_of(name):
    """The file of a lesson, or of another name that is a path without its .py."""
    return ROOT / lessons().get(name, f"{name}.py")
