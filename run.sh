#!/usr/bin/env bash
# ./run.sh                 run every lesson on real text and hold each against single.py: a line each, more in runs/
# ./run.sh ddp ...         only these
# ./run.sh test [LESSON]   the tests, or those of a lesson (what else follows goes to pytest)
# ./run.sh fuzz [SEED] [N] N runs with random flags, good and odd
# ./run.sh lint            ruff, and each file beside its budget
# ./run.sh site            the lessons as pages, in docs/site
# ./run.sh films [LESSON]  what each rank does in a step, for these pages; as root on Linux over links of 1 Gbit/s
# ./run.sh gpu             for whoever has GPUs: half an hour, docs/results/gpu.md (--rehearse: on a CPU, toy sizes)
#
# NPROC=2 ./run.sh         ranks (default: the GPUs, or 4 without any)
# FLAGS="--size small --dtype bf16 --data my_text/" ./run.sh
set -euo pipefail
cd "$(dirname "$0")"

# In reading order.
LESSONS=(single collectives dp_threads dp_async ddp zero1 zero2 zero3 hsdp muon diloco offload
    tensor_parallel sequence_parallel context_parallel expert_parallel pipeline zero_bubble
    pipeline_v parallel_3d checkpointing zero_r fusion resume survive)

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

# A Python that has all the packages of a requirements file: the one on PATH, or .venv, made if need be.
set_up() {
    local requirements=$1 probe="import importlib.util, sys; sys.exit(any(importlib.util.find_spec(p) is None for p in '$2'.split()))"
    for python in .venv/bin/python python3 python; do
        if command -v "$python" >/dev/null && "$python" -c "$probe" 2>/dev/null; then return; fi
    done
    say "Setting up .venv from $requirements (once) ..."
    [ -x .venv/bin/python ] || python3 -m venv .venv
    python=.venv/bin/python
    "$python" -m pip install --quiet --requirement "$requirements"
}

film() { # LESSON: docs/films/LESSON.json, of a step on 4 ranks
    local lesson=$1 ranks=4 threads=""
    local flags=(--layers 4 --width 256 --context 64 --batch 16 --steps 2)
    case $lesson in
    single) ranks=1 ;;
    offload) ranks=2 ;; # each with lanes of its host and link
    dp_threads) ranks=1 threads="--replicas 4" ;;
    dp_async) ranks=1 threads="--workers 4" ;;
    parallel_3d) flags+=(--layers 2 --tp 2 --pp 2 --accum 2) ;;
    diloco) flags+=(--inner-steps 2 --steps 4) ;;
    hsdp) flags+=(--shard 2) ;;
    sequence_parallel | context_parallel | expert_parallel | muon) flags+=(--layers 2) ;;
    esac
    local command=(tools/ledger.py --film "docs/films/$lesson.json" "$lesson.py" "${flags[@]}" $threads)
    say "$lesson"
    mkdir -p docs/films
    rm -f "docs/films/$lesson.json"
    if [ $ranks = 1 ]; then
        "$python" "${command[@]}"
    elif [ "$(id -u)" = 0 ] && command -v ip tc >/dev/null; then # whose torchruns may end in any order
        PYTHON=$(realpath -s "$python") bench/hosts.sh $ranks 1gbit -- "${command[@]}" || true
    else
        "$python" -m torch.distributed.run --nproc_per_node=$ranks "${command[@]}"
    fi
    [ -f "docs/films/$lesson.json" ]
}

case "${1:-}" in
test)
    shift
    set_up requirements-dev.txt "torch numpy pytest xdist matplotlib jinja2 markdown pygments playwright html5lib"
    lesson=${1:-} && lesson=${lesson%.py}
    if [[ " ${LESSONS[*]} " == *" $lesson "* ]]; then set -- --lesson "$lesson" "${@:2}"; fi
    OMP_NUM_THREADS=1 exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" # a file's tests share their worlds
    ;;
fuzz)
    set_up requirements-dev.txt "torch numpy pytest"
    OMP_NUM_THREADS=1 FUZZ="${2:-$RANDOM} ${3:-200}" exec "$python" -m pytest --durations=0 -sq test_all.py -k random_flags
    ;;
lint)
    set_up requirements-dev.txt "ruff"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    exec "$python" tools/form.py
    ;;
site)
    set_up requirements-dev.txt "torch numpy matplotlib pygments jinja2 markdown"
    "$python" site/book.py
    say "Open docs/site/index.html"
    exit
    ;;
films)
    shift
    set_up requirements.txt "torch numpy"
    [ $# -gt 0 ] || set -- "${LESSONS[@]}"
    for lesson; do
        film "${lesson%.py}"
    done
    exit
    ;;
gpu)
    shift
    set_up requirements.txt "torch numpy"
    exec "$python" bench/gpu.py "$@"
    ;;
esac

set_up requirements.txt "torch numpy"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
ranks=${NPROC:-$((gpus > 0 ? gpus : 4))}
[ $# -gt 0 ] || set -- "${LESSONS[@]}"
for lesson; do
    [[ " ${LESSONS[*]} " == *" ${lesson%.py} "* ]] && continue
    echo "run.sh: no lesson '$lesson'; choose from: ${LESSONS[*]}" >&2
    exit 2
done

flags=(--batch $((4 * ranks)) --steps 10 ${FLAGS:-}) # the same text, batches and steps for all
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
torchrun="$python -m torch.distributed.run --nproc_per_node"
as_ddp="--optim sgd --clip inf"
rm -rf runs
mkdir -p runs

run() { # NAME COMMAND ...; what it prints goes to runs/NAME.log
    local name=$1 command="${*:2} ${flags[*]}"
    echo "$command" >"runs/$name.log"
    ${LIMIT:+timeout --foreground --kill-after=40 "$LIMIT"} $command --json "runs/$name.json" --save "runs/$name.pt" >>"runs/$name.log" 2>&1 ||
        echo "exit code $?" >>"runs/$name.log"
}

run_all() { # and say the name of each as it ends
    run single "$python" tools/ledger.py single.py
    echo single
    [ -f runs/single.pt ] || return
    for lesson; do
        watched="tools/ledger.py $lesson.py"
        case $lesson in
        single) continue ;;
        dp_threads) run "$lesson" "$python" "$watched" --replicas "$ranks" ;;
        dp_async) run "$lesson" "$python" "$watched" --workers "$ranks" ;;
        expert_parallel | muon) # which train another model, or otherwise
            run "$lesson-alone" "$python" "$watched"
            run "$lesson" "$torchrun=$ranks" "$watched"
            ;;
        diloco) # which is ddp.py with these flags alone
            run "$lesson-alone" "$python" tools/ledger.py single.py $as_ddp
            run "$lesson" "$torchrun=$ranks" "$watched" --inner-steps 1 --outer-lr 1 $as_ddp
            ;;
        resume) # which stops after 5 steps and goes on with half the ranks
            saves="--checkpoint runs/checkpoints --every 5"
            $torchrun=$ranks resume.py "${flags[@]}" $saves --steps 5 >runs/resume-begun.log 2>&1 || true
            run "$lesson" "$torchrun=$((ranks % 2 ? 1 : ranks / 2))" "$watched" "$saves"
            ;;
        *) run "$lesson" "$torchrun=$ranks" "$watched" ;;
        esac
        echo "$lesson"
    done
}

run_all "${@%.py}" | "$python" tools/compare.py runs -
