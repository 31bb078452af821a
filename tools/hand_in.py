"""What check.py of a handout does; tools/handout.py copies this file there.

    python check.py            what there is to do
    python check.py NAME       is work/NAME.py right? Promises in order, up to the first that breaks
    python check.py hint NAME  three times: which tensor, and when; which call; the shape of the code

Each check and each hint is noted in log.jsonl, with the time, the promise and a hash of the file.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def note(name, what, promise=""):
    """Add a line to the log."""
    text = (HERE / f"work/{name}.py").read_bytes()
    entry = {"time": round(time.time()), "name": name, "what": what, "promise": promise}
    entry["hash"] = hashlib.sha256(text).hexdigest()[:16]
    with open(HERE / "log.jsonl", "a") as log:
        log.write(json.dumps(entry) + "\n")


def hint(name, given):
    """Print one hint more than before."""
    hints = given["hints"]
    note(name, "hint")
    log = map(json.loads, (HERE / "log.jsonl").read_text().splitlines())
    asked = sum(entry["name"] == name and entry["what"] == "hint" for entry in log)
    print(
        "\n".join(hints[:asked] or ["A bug has no hints: which promise breaks first, and on how many ranks?"])
    )


def check(name, given):
    """Print which promises work/NAME.py keeps. Returns whether it keeps all."""
    import promises
    import torch

    run = promises.run
    known = torch.load(HERE / "runs.pt")

    def run_or_known(path, lesson, size=1, flags="", **options):
        """What run() says; of a lesson, which is not here, what it said when the handout was made."""
        if Path(path).exists():
            return run(path, lesson, size, flags, **options)
        return known[Path(path).stem, size, flags]

    promises.run = run_or_known
    problem = None
    for promise, problem in promises.promises(str(HERE / f"work/{name}.py"), given["lesson"]):
        print(f"{'no: ' if problem else 'yes:'} {promise}")
        if problem:
            print(f"     {problem}")
            break
    promises.run = run
    note(name, "check", promise if problem else "")
    print("Not yet" if problem else "Done")
    return not problem


def main():
    sys.path.insert(0, str(HERE / "tools"))
    exercises = json.loads((HERE / "handout.json").read_text())["exercises"]
    what = "hint" if sys.argv[1:2] == ["hint"] else "check"
    name = sys.argv[-1] if sys.argv[1:] else ""
    if name not in exercises:
        for each, given in exercises.items():
            print(f"work/{each}.py: {given['task']}")
        sys.exit(
            f"python check.py NAME, or: python check.py hint NAME; NAME is one of {', '.join(exercises)}"
        )
    if what == "hint":
        hint(name, exercises[name])
    elif not check(name, exercises[name]):
        sys.exit(1)


if __name__ == "__main__":
    main()
