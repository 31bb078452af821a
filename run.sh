#!/usr/bin/env bash
# ./run.sh                 run every lesson on real text and compare each with single.py: a line each, more in runs/
# ./run.sh ddp ...         only these
# ./run.sh test [LESSON]   the tests, or those of a lesson (what else follows goes to pytest)
# ./run.sh fuzz [SEED] [N] N runs with random flags, good and odd; all that the tests take samples of
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
LESSONS=(single collectives dp_threads dp_async ddp uneven diloco zero1 zero2 zero3 hsdp muon offload
    tensor_parallel sequence_parallel context_parallel expert_parallel checkpointing zero_r fusion
    pipeline zero_bubble pipeline_v parallel_3d resume survive)

# Ranks meet on the loopback interface, so that this host's own name need not resolve.
torchrun="-m torch.distributed.run --local-addr=127.0.0.1 --nproc_per_node"
if [ "$(uname)" = Darwin ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo0}; fi

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

refuse() { # in one line that says what to change
    echo "run.sh: $*" >&2
    exit 2
}

# Set $python to a Python that has all packages of a requirements file: the one on PATH, or .venv, made if need be.
set_up() {
    local requirements=$1 recent="import sys; sys.exit(sys.version_info < (3, 11))"
    local probe="import importlib.util as u, sys; sys.exit(any(u.find_spec(p) is None for p in '$2'.split()))"
    for python in .venv/bin/python python3 python; do
        if command -v "$python" && "$python" -c "$recent" && "$python" -c "$probe"; then return; fi
    done >/dev/null 2>&1
    python=.venv/bin/python
    if ! "$python" -c "import pip; $recent" 2>/dev/null; then # it is missing, broken or of an older Python
        python3 -c "$recent" 2>/dev/null || refuse "needs Python 3.11 or later, but python3 is: $(python3 -V 2>&1)"
        python3 -c "import ensurepip, venv" 2>/dev/null || refuse "python3 has no venv: apt install python3-venv"
        python3 -m venv --clear .venv
    fi
    say "Setting up .venv from $requirements (once) ..."
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
        "$python" $torchrun=$ranks "${command[@]}"
    fi
    [ -f "docs/films/$lesson.json" ]
}

case "${1:-}" in
test)
    shift
    set_up requirements-dev.txt "torch numpy pytest xdist matplotlib jinja2 markdown pygments playwright html5lib"
    lesson=${1:-} && lesson=${lesson%.py}
    if [[ " ${LESSONS[*]} " == *" $lesson "* ]]; then set -- --lesson "$lesson" "${@:2}"; fi
    OMP_NUM_THREADS=1 exec "$python" -m pytest -n auto --maxprocesses=8 --dist worksteal "$@" # auto: as many as cores
    ;;
fuzz)
    set_up requirements-dev.txt "torch numpy pytest"
    export OMP_NUM_THREADS=1 FUZZ="${2:-$RANDOM} ${3:-200}"
    say "Seed and runs: $FUZZ"
    exec "$python" -m pytest -vv test_all.py tests/test_{survive,learn}.py -k "random or two_deaths or exercises"
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
    refuse "no lesson '$lesson'; choose from: ${LESSONS[*]}"
done

if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then # they take turns on a GPU: see docs/one_gpu.md
    export NCCL_ALGO=${NCCL_ALGO:-Ring} NCCL_PROTO=${NCCL_PROTO:-Simple}
fi
flags=(--batch $((4 * ranks)) --steps 10 ${FLAGS:-}) # the same text, batches and steps for all
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
torchrun="$python $torchrun"
as_ddp="--optim sgd --clip inf"
rm -rf runs
mkdir -p runs

run() { # NAME COMMAND ...; what it prints goes to runs/NAME.log
    local name=$1 command="${*:2} ${flags[*]} ${last:-}"
    echo "$command" >"runs/$name.log"
    ${LIMIT:+"$python" bench/limit.py "$LIMIT"} $command --json "runs/$name.json" --save "runs/$name.pt" >>"runs/$name.log" 2>&1 ||
        echo "exit code $?" >>"runs/$name.log"
}

run_plain() { # NAME COMMAND ...: what a lesson is compared with, and the same with one sequence at a time
    run "$@"
    local batch
    batch=$(sed -n 's/.* | batch \([0-9]*\) = .*/\1/p' "runs/$1.log")
    last="--accum $batch" run "${1%-alone}-split" "${@:2}"
}

run_all() { # and print the name of each as it ends
    run_plain single "$python" tools/ledger.py single.py
    echo single
    [ -f runs/single.pt ] || return
    for lesson; do
        watched="tools/ledger.py $lesson.py"
        case $lesson in
        single) continue ;;
        dp_threads) run "$lesson" "$python" "$watched" --replicas "$ranks" ;;
        dp_async) run "$lesson" "$python" "$watched" --workers "$ranks" ;;
        expert_parallel) # which trains another model; --accum is no yardstick: it changes what is balanced
            # The choice of an expert can turn on one rounding: with --dtype fp64 no choice comes that close.
            run "$lesson-alone" "$python" "$watched" --dtype fp64
            run "$lesson" "$torchrun=$ranks" "$watched" --dtype fp64
            ;;
        muon | uneven) # which has another optimizer, or other batches
            run_plain "$lesson-alone" "$python" "$watched"
            run "$lesson" "$torchrun=$ranks" "$watched"
            ;;
        diloco) # which is ddp.py with these flags alone
            run "$lesson-alone" "$python" tools/ledger.py single.py $as_ddp
            run "$lesson" "$torchrun=$ranks" "$watched" --inner-steps 1 --outer-lr 1 --outer-momentum 0 $as_ddp
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
