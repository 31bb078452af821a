#!/usr/bin/env bash
# ./run.sh                 run every lesson on real text and compare each with single.py: a line each, more in runs/
# ./run.sh ddp ...         only these
# ./run.sh setup           only make .venv with torch and numpy, if the Python on PATH lacks them
# ./run.sh test [LESSON]   the tests, or those of a lesson, or of learn.py: learn (what else follows goes to pytest)
# ./run.sh fuzz [SEED] [N] N runs with random flags, good and odd; deaths, answers and hand-ins that the tests sample
# ./run.sh lint            ruff, and each file beside its budget
# ./run.sh site            the lessons as pages, in docs/site
# ./run.sh films [LESSON]  what each rank does in a step, for these pages; as root on Linux over links of 1 Gbit/s
# ./run.sh figures [PAGE]  the figures on README and in docs/results, measured anew, in 75 minutes (--list: what is stale)
# ./run.sh gpu [...]       for whoever has GPUs: half an hour, docs/results/gpu.md (--rehearse: on a CPU, toy sizes)
#
# NPROC=2 ./run.sh         ranks (default: the GPUs, or 4 without any)
# FLAGS="--size small --dtype bf16 --data my_text/" ./run.sh (flags of the lessons, separated by blanks)
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run.sh
set -euo pipefail
set -f # FLAGS are no patterns
unset CDPATH
cd -P -- "$(dirname -- "$0")"

# In reading order.
LESSONS=(single collectives dp_threads dp_async ddp uneven diloco zero1 zero2 zero3 hsdp muon offload
    tensor_parallel sequence_parallel context_parallel expert_parallel expert_zero checkpointing zero_r fusion
    pipeline zero_bubble pipeline_v parallel_3d reshard resume survive)

# Ranks meet on the loopback interface, so that this host's own name need not resolve.
torchrun="-m torch.distributed.run --local-addr=127.0.0.1 --nproc_per_node"
if [ "$(uname)" = Darwin ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo0}; fi

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

refuse() { # in one line that says what to change
    echo "run.sh: $*" >&2
    exit 2
}
[ -f tools/compare.py ] || refuse "$PWD is no checkout of rankzero; call run.sh by its own path, not by a link"

is_lesson() {
    local lesson
    for lesson in "${LESSONS[@]}"; do [ "$lesson" != "$1" ] || return 0; done
    return 1
}

check_lessons() { # NAMES, with or without .py
    local name
    for name; do
        is_lesson "${name%.py}" || refuse "no lesson '$name'; choose from: ${LESSONS[*]}"
    done
}

# Set $python to a Python that has all packages of a requirements file: the one on PATH, or .venv, made if need be.
set_up() {
    local requirements=$1 recent="import sys; sys.exit(sys.version_info < (3, 11))"
    local probe="from importlib.metadata import version; [version(p) for p in '$2'.split()]" # installed to the end
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
    reshard) flags+=(--how direct) ;;
    sequence_parallel | context_parallel | expert_parallel | expert_zero | muon) flags+=(--layers 2) ;;
    esac
    local film=runs/film.json # which takes the old one's place once it is whole
    local command=(tools/ledger.py --film $film "$lesson.py" "${flags[@]}" $threads)
    say "$lesson"
    mkdir -p docs/films runs
    rm -f $film
    if [ $ranks = 1 ]; then
        "$python" "${command[@]}"
    elif [ "$(id -u)" = 0 ] && command -v ip tc >/dev/null; then # whose torchruns may end in any order
        PYTHON=$(realpath -s "$python") bench/hosts.sh $ranks 1gbit -- "${command[@]}" || true
    else
        "$python" $torchrun=$ranks "${command[@]}"
    fi
    mv $film "docs/films/$lesson.json"
}

case "${1:-}" in
setup)
    set_up requirements.txt "torch numpy"
    say "$python has all that the lessons need. Now: ./run.sh, or python learn.py"
    exit
    ;;
test)
    shift
    set_up requirements-dev.txt "torch numpy pytest pytest-xdist matplotlib jinja2 markdown pygments playwright html5lib"
    lesson=${1:-} && lesson=${lesson%.py}
    if is_lesson "$lesson"; then set -- --lesson "$lesson" "${@:2}"; fi
    if [ "$lesson" = learn ]; then set -- tests/test_{learn,exercises,handout}.py "${@:2}"; fi
    OMP_NUM_THREADS=1 exec "$python" -m pytest -n auto --maxprocesses=8 --dist worksteal "$@" # auto: as many as cores
    ;;
fuzz)
    set_up requirements-dev.txt "torch numpy pytest"
    export OMP_NUM_THREADS=1 FUZZ="${2:-$RANDOM} ${3:-200}"
    say "Seed and runs: $FUZZ"
    parts="random or two_deaths or exercises or lazy or honest or test_handout or pays_on"
    exec "$python" -m pytest -vv test_all.py tests/test_{survive,resume,learn,plan,handout}.py -k "$parts"
    ;;
lint)
    set_up requirements-dev.txt "ruff"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" bench/pages.py --stale # a warning: red when no page has a typed table left
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
    check_lessons "$@"
    set_up requirements.txt "torch numpy"
    [ $# -gt 0 ] || set -- "${LESSONS[@]}"
    for lesson; do
        film "${lesson%.py}"
    done
    exit
    ;;
figures)
    shift
    set_up requirements-dev.txt "torch numpy matplotlib"
    exec "$python" bench/pages.py "$@"
    ;;
gpu)
    shift
    set_up requirements.txt "torch numpy"
    exec "$python" bench/gpu.py "${@%.py}"
    ;;
-h | --help)
    sed -n '2,/^\[/s/^# \{0,1\}//p' run.sh
    exit
    ;;
esac

check_lessons "$@"
for flag in --json --save; do
    [[ " ${FLAGS:-} " != *" $flag"[\ =]* ]] || refuse "FLAGS: $flag is run.sh's own: see runs/LESSON.json and .pt"
done
set_up requirements.txt "torch numpy"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ "$gpus" -gt 0 ]; then
    gpus=$(echo "$CUDA_VISIBLE_DEVICES" | tr , '\n' | grep -c '[^ ]' || true)
fi
ranks=${NPROC:-$((gpus > 0 ? gpus : 4))}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || refuse "NPROC='$ranks': must be a number of ranks"
[ $# -gt 0 ] || set -- "${LESSONS[@]}"

if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then # they take turns on a GPU: see docs/one_gpu.md
    export NCCL_ALGO=${NCCL_ALGO:-Ring} NCCL_PROTO=${NCCL_PROTO:-Simple}
fi
flags=(--batch $((4 * ranks)) --steps 10 ${FLAGS:-}) # the same text, batches and steps for all
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
torchrun="$python $torchrun"
as_ddp="--optim sgd --clip inf"

mkdir -p runs
if ! (set -C && echo $$ >runs/pid) 2>/dev/null; then # one run at a time writes to runs/
    other=$(cat runs/pid)
    ! kill -0 "$other" 2>/dev/null || refuse "process $other writes to runs/: wait for its end (or delete runs/pid)"
    echo $$ >runs/pid
fi
trap 'rm -f runs/pid' EXIT
for lesson in "${LESSONS[@]}"; do
    for name in "$lesson" "$lesson-alone" "$lesson-split"; do
        rm -f "runs/$name.json" "runs/$name.pt" "runs/$name.log"
    done
done
rm -rf runs/resume-begun.log runs/resume-begun

run() { # NAME COMMAND ...; what it prints goes to runs/NAME.log
    local name=$1 command="${*:2} ${flags[*]} ${last:-}"
    echo "$command" >"runs/$name.log"
    command="${LIMIT:+$python bench/limit.py $LIMIT} $command --json runs/$name.json --save runs/$name.pt"
    finish $command >>"runs/$name.log" 2>&1 && return
    echo "exit code $?" >>"runs/$name.log"
    rm -f "runs/$name.json" "runs/$name.pt" # a command that failed has no result
}

finish() { # COMMAND ...: so that it ends if run.sh is ended
    "$@" &
    child=$!
    wait $child
}

run_plain() { # NAME COMMAND ...: what a lesson is compared with, and the same with one sequence at a time
    run "$@"
    local batch
    batch=$(sed -n 's/.* | batch \([0-9]*\) = .*/\1/p' "runs/$1.log")
    last="--accum $batch" run "${1%-alone}-split" "${@:2}"
}

run_all() { # and print the name of each as it ends
    trap 'kill $child 2>/dev/null || true; wait; exit 1' HUP INT TERM
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
        expert_zero) # which is the former's twin
            run "$lesson-alone" "$python" tools/ledger.py expert_parallel.py --dtype fp64
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
        resume) # which stops after half of the steps and goes on with half the ranks
            half=$(echo "${flags[*]}" | sed 's/.*--steps[ =]\([0-9]*\).*/\1/')
            half=$((half / 2))
            saves="--checkpoint runs/resume-begun --every $((half > 0 ? half : 1))"
            finish $torchrun=$ranks resume.py "${flags[@]}" $saves --steps $half >runs/resume-begun.log 2>&1 || true
            run "$lesson" "$torchrun=$((ranks % 2 ? 1 : ranks / 2))" "$watched" "$saves"
            ;;
        *) run "$lesson" "$torchrun=$ranks" "$watched" ;;
        esac
        echo "$lesson"
    done
}

run_all "${@%.py}" | "$python" tools/compare.py runs - &
trap 'trap "" HUP INT TERM; kill $(jobs -p) $! 2>/dev/null || true; wait; exit 143' HUP INT TERM # torchruns, too
wait $!
