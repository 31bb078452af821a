"""Step times on paper, beside those that bench/bench.py measured on limited links: a table in Markdown.

    python bench/bench.py ddp zero1 zero2 zero3 --hosts 2 --batch 8 --no-memory --json runs/hosts2.json
    python bench/scaling.py runs/hosts*.json --latency-ms 0.15

The model: a third of the computation C is forward, two thirds are backward; each part lasts as long as its
computation or its messages, whichever is longer, and nothing else takes time:

    T = max(C / 3, W_f / B + M_f H L) + max(2 C / 3, W_b / B + M_b H L)

W: bytes that a rank sends in forward and in backward, M: messages, both as tools/ledger.py --ranks counts
them in the lesson's own code; H: N - 1 hops round the ring (an all-reduce: twice); B: the link's bytes per
second; L: the latency of a hop. C is measured, the median "compute alone" of all lessons in the file, where
hosts that share cores slow each other down. Predictions for more ranks than were measured take the C of the
first file, and as many sequences per rank, so N times the batch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import ROOT, bytes_per_second

FAR = (8, 64, 512)  # ranks that nobody measured


def traffic(lesson, ranks, flags):
    """((bytes, hops) in forward, (bytes, hops) in backward) of a rank in a step."""
    command = [sys.executable, str(ROOT / "tools" / "ledger.py"), "--ranks", str(ranks)]
    with tempfile.NamedTemporaryFile() as file:
        command += ["--json", file.name, str(ROOT / f"{lesson}.py"), *flags]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        result = json.load(file)
    empty = {"wire": 0, "calls": 0}
    reduced, gathered, summed = (
        result["sent"].get(kind, empty) for kind in ("reduce-scatter", "all-gather", "all-reduce")
    )
    # Forward gathers each unit once, as much as backward reduces. What else is gathered, zero3.py gathers in
    # backward; so that has as many bytes and messages as all that is gathered.
    hops = 2 * summed["calls"] + gathered["calls"]
    return (reduced["wire"], reduced["calls"]), (summed["wire"] + gathered["wire"], hops)


def predict(compute, parts, ranks, rate, latency):
    """Seconds of a step; compute and latency in seconds, rate in bytes per second."""
    shares = zip((compute / 3, 2 * compute / 3), parts)
    return sum(max(busy, wire / rate + calls * (ranks - 1) * latency) for busy, (wire, calls) in shares)


def flags_of(bench, ranks):
    """The lesson's flags of a run of bench/bench.py, with as many sequences per rank on so many ranks."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--batch", type=int)
    batch = parser.parse_known_args(bench["flags"])[0].batch // bench["ranks"] * ranks
    return [*bench["flags"], "--batch", str(batch)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benches", nargs="+", help="--json of bench/bench.py with --hosts, the fewest first")
    parser.add_argument("--latency-ms", type=float, required=True, help="of a hop on these links")
    given = parser.parse_args()
    benches = [json.loads(Path(path).read_text()) for path in given.benches]
    latency, errors = given.latency_ms / 1e3, []
    print("| lesson | ranks | compute alone, ms | sent, MB | predicted, ms | measured, ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for lesson in benches[0]["lessons"]:
        measured = [bench for bench in benches if lesson in bench["lessons"]]
        cases = [(bench, bench["ranks"], bench["lessons"][lesson]) for bench in measured]
        cases += [(benches[0], ranks, None) for ranks in FAR]
        for bench, ranks, table in cases:
            parts = traffic(lesson, ranks, flags_of(bench, ranks))
            compute = statistics.median(t["compute alone"]["ms"] for t in bench["lessons"].values()) / 1e3
            rate = bytes_per_second(bench["rate"])
            ms = 1e3 * predict(compute, parts, ranks, rate, latency)
            sent = sum(wire for wire, _ in parts) / 1e6
            line = f"| {lesson}.py | {ranks} | {1e3 * compute:.0f} | {sent:.2f} | {ms:.0f} |"
            if table:
                took = table[f"{lesson}.py"]["ms"]
                errors.append(ms / took)
                line += f" {took:.0f} | {ms / took:.2f} |"
            print(line if table else line + " | |")
    print(f"\nPredicted / measured: median {statistics.median(errors):.2f}", end="")
    print(f", from {min(errors):.2f} to {max(errors):.2f}.")


if __name__ == "__main__":
    main()
