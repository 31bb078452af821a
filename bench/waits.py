"""How long a rank of a lesson waits for messages: ms of a step, the share that it waits, and when, as JSON.

    PYTHON=python3 bench/hosts.sh 2 100mbit -- bench/waits.py ddp.py --size small --batch 8
    PYTHON=python3 bench/hosts.sh 2 100mbit -- bench/waits.py --json plain.json diloco.py --steps 60

Runs the unmodified lesson. What comes up to its first printed line is not counted. Times are rank 0's: a wait
is a call of Work.wait(), which over gloo holds up the host until the message has come; a message is on the
network from its start to the end of its work; of these all-reduces are seen. (Over NCCL the host does not
wait: tools/ledger.py --trace.)
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import ledger


def watch(lesson, config):
    """Run lesson.train(config). Returns when lines were printed, and [(begin, end)] of waits and messages."""
    lines, waits, messages = [], [], []
    wait, print_step, all_reduce = dist.Work.wait, lesson.print_step, dist.all_reduce

    def timed_wait(work, *timeout):
        begin = time.perf_counter()
        done = wait(work, *timeout)
        waits.append((begin, time.perf_counter()))
        return done

    def timed_all_reduce(tensor, *args, async_op=False, **kwargs):
        begin = time.perf_counter()
        work = all_reduce(tensor, *args, async_op=True, **kwargs)
        if tensor.numel() > 2:  # not a loss
            work.get_future().then(lambda _: messages.append((begin, time.perf_counter())))
        return work if async_op else work.wait()

    def timed_print_step(*arguments):
        print_step(*arguments)
        lines.append(time.perf_counter())

    dist.Work.wait, lesson.print_step, dist.all_reduce = timed_wait, timed_print_step, timed_all_reduce
    lesson.train(config)
    return lines, waits, messages


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--json", help="file for [begin, length] in seconds of what computes and what travels"
    )
    parser.add_argument("lesson")
    given, flags = parser.parse_known_args()
    lesson = ledger.load(given.lesson)
    config = lesson.parse(flags)
    lines, waits, messages = watch(lesson, config)
    if dist.get_rank() == 0:
        first, last = lines[0], lines[-1]
        steps = config.steps - -(-config.steps // len(lines))
        waited = sum(end - begin for begin, end in waits if first < begin < last)
        ms, share = 1e3 * (last - first) / steps, waited / (last - first)
        print(f"{given.lesson} {' '.join(flags)}: {ms:.1f} ms a step, waits {share:.1%} of the time")
        if given.json:
            computes = zip([first, *(end for _, end in waits)], [*(begin for begin, _ in waits), last])
            spans = {"seconds": last - first, "computes": list(computes), "network": messages}
            for name in "computes", "network":
                inside = [(max(begin, first), min(end, last)) for begin, end in spans[name]]
                spans[name] = [(begin - first, end - begin) for begin, end in inside if begin < end]
            Path(given.json).write_text(json.dumps(spans))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
