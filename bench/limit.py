"""End a command that takes too long: python bench/limit.py SECONDS COMMAND ...

timeout(1), which macOS does not have. Exits with the command's code, or with 124 if the command was ended.
"""

import signal
import subprocess
import sys

GRACE = 40  # seconds: torchrun needs up to 30 to end its ranks


def run_to_its_end(command, **options):
    """The exit code of a command, which ends before this process does, if that is told to end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    process = subprocess.Popen(command, **options)
    try:
        return process.wait()
    finally:
        process.terminate()
        process.wait()


def main(seconds, *command):
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # whoever is ended ends its command
    try:
        return process.wait(float(seconds))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
    return 124


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
