"""End a command that takes too long: python bench/limit.py SECONDS COMMAND ...

timeout(1), which macOS does not have. Exits with the command's code, or with 124 if the command was ended.
"""

import signal
import subprocess
import sys

GRACE = 40  # seconds: torchrun needs up to 30 to end its ranks


def run_to_its_end(command, seconds=None, **options):
    """The exit code of a command, which ends before this process does, if that is told to end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    process = subprocess.Popen(command, **options)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(run_to_its_end(sys.argv[2:], float(sys.argv[1])))
