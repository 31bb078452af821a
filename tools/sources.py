"""What exercises are made from: the lessons' files, as committed, and the bugs of tests/bugs.py."""

import functools
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AS_COMMITTED = False  # learn.py sets it, as learners edit lessons; other tools take the files as they are


@functools.cache
def original(lesson):
    """The path of a lesson's file; with AS_COMMITTED, if it has been edited, of what is committed."""
    path = ROOT / f"{lesson}.py"
    if AS_COMMITTED:
        shown = subprocess.run(["git", "-C", ROOT, "show", f"HEAD:./{path.name}"], capture_output=True)
        if shown.returncode == 0 and shown.stdout != path.read_bytes():
            print(f"{path.name} has been edited: its committed text is used.", file=sys.stderr)
            path = Path(tempfile.mkdtemp(), path.name)
            path.write_bytes(shown.stdout)
    return str(path)


def find_bugs():
    """{name: (lesson, right text, wrong text, why it is wrong, how one finds it)}, in the lessons' order."""
    sys.path.insert(0, str(ROOT))
    from tests.bugs import BUGS

    bugs = {}
    for lesson, old, new, why, how in BUGS:
        number = zlib.crc32(f"{old} {new}".encode()) % 2**16
        bugs[f"{lesson}-{number:04x}"] = lesson, old, new, why, how
    return bugs
