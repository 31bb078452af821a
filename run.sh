#!/usr/bin/env bash
# ./run.sh                 run every lesson on real text and compare each with single.py; more in runs/
# ./run.sh ddp ...         only these
# ./run.sh setup           only make .venv with torch and numpy, if the Python on PATH lacks them
# ./run.sh test [LESSON]   the tests, or those of a lesson, or of learn.py: learn (the rest goes to pytest)
# ./run.sh fuzz [SEED] [N] N runs with random flags, good and odd; deaths and answers that the tests sample
# ./run.sh lint            ruff, and each lesson and folder beside its number of lines
# ./run.sh site            the lessons as pages, with films, in docs/site
# ./run.sh gpu [...]       for whoever has GPUs: half an hour, runs/gpu.md (--rehearse: on a CPU, toy sizes)
#
# NPROC=2 ./run.sh         ranks (default: the GPUs, or 4 without any)
# FLAGS="--size small --dtype bf16 --data my_text/" ./run.sh (flags of the lessons, separated by blanks)
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run.sh
set -euo pipefail
set -f # FLAGS are no patterns
unset CDPATH
cd -P -- "$(dirname -- "$0")"

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

refuse() { # in one line that says what to change
    echo "run.sh: $*" >&2
    exit 2
}
[ -f tools/compare.py ] || refuse "$PWD is no checkout of rankzero; call run.sh by its own path, no link"

# README's table is the list of lessons, in reading order: ddp, more/hsdp, ...
LESSONS=$(sed -n 's/^| \[`[^`]*`\](\([a-z0-9_/]*\)\.py).*/\1/p' README.md)

path_of() { # NAME, with or without .py
    local lesson
    for lesson in $LESSONS; do
        if [ "${lesson#more/}" = "${1%.py}" ]; then echo "$lesson.py" && return; fi
    done
    refuse "no lesson '${1%.py}'; choose from:" ${LESSONS//more\//}
}

special() { # NAME CONSTANT: what tests/test_NAME.py sets it to, in one line (see tools/lessons.py)
    sed -n "s/^$2 = \"\(.*\)\"$/\1/p" "tests/test_$1.py" 2>/dev/null || true
}

# Set $python to a Python that has all packages of a requirements file: on PATH, or .venv, made if need be.
set_up() {
    local requirements=$1 recent="import sys; sys.exit(sys.version_info < (3, 11))"
    local probe="from importlib.metadata import version; [version(p) for p in '$2'.split()]"
    for python in .venv/bin/python python3 python; do
        if command -v "$python" && "$python" -c "$recent" && "$python" -c "$probe"; then return; fi
    done >/dev/null 2>&1
    python=.venv/bin/python
    if ! "$python" -c "import pip; $recent" 2>/dev/null; then # it is missing, broken or of an older Python
        python3 -c "$recent" 2>/dev/null ||
            refuse "needs Python 3.11 or later, but python3 is: $(python3 -V 2>&1)"
        python3 -c "import ensurepip, venv" 2>/dev/null ||
            refuse "python3 has no venv: apt install python3-venv"
        python3 -m venv --clear .venv
    fi
    say "Setting up .venv from $requirements (once) ..."
    "$python" -m pip install --quiet --requirement "$requirements"
}

case "${1:-}" in
setup)
    set_up requirements.txt "torch numpy"
    say "$python has all that the lessons need. Now: ./run.sh, or python learn.py"
    exit
    ;;
test)
    shift
    case "${1:-}" in
    "" | -* | *::* | */*) ;; # for pytest
    learn | learn.py) set -- tests/test_learn.py "${@:2}" ;;
    *) path_of "$1" >/dev/null && set -- --lesson "${1%.py}" "${@:2}" ;;
    esac
    set_up requirements-dev.txt "torch numpy pytest pytest-xdist jinja2 markdown pygments"
    export OMP_NUM_THREADS=1
    exec "$python" -m pytest -n auto --maxprocesses=8 --dist worksteal "$@" # auto: as many as cores
    ;;
fuzz)
    set_up requirements-dev.txt "torch numpy pytest"
    export OMP_NUM_THREADS=1 FUZZ="${2:-$RANDOM} ${3:-200}"
    say "Seed and runs: $FUZZ"
    exec "$python" -m pytest -vv -k "random or two_deaths or lazy or honest or slip" --mutants all
    ;;
lint)
    set_up requirements-dev.txt "ruff"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    exec "$python" tools/form.py
    ;;
site)
    shift
    set_up requirements-dev.txt "torch numpy pygments jinja2 markdown"
    "$python" site/book.py "$@"
    say "Open docs/site/index.html"
    exit
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

[ $# -gt 0 ] || set -- ${LESSONS//more\//}
for lesson; do path_of "$lesson" >/dev/null; done
for flag in --json --save; do
    [[ " ${FLAGS:-} " != *" $flag"[\ =]* ]] ||
        refuse "FLAGS: $flag is run.sh's own: see runs/LESSON.json and .pt"
done
set_up requirements.txt "torch numpy"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ "$gpus" -gt 0 ]; then
    gpus=$(echo "$CUDA_VISIBLE_DEVICES" | tr , '\n' | grep -c '[^ ]' || true)
fi
ranks=${NPROC:-$((gpus > 0 ? gpus : 4))}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || refuse "NPROC='$ranks': must be a number of ranks"
if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then # they take turns on a GPU: see docs/one_gpu.md
    export NCCL_ALGO=${NCCL_ALGO:-Ring} NCCL_PROTO=${NCCL_PROTO:-Simple}
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Ranks meet on the loopback interface, so that this host's own name need not resolve.
torchrun="$python -m torch.distributed.run --local-addr=127.0.0.1 --nproc_per_node=$ranks"
if [ "$(uname)" = Darwin ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo0}; fi
flags="--batch $((4 * ranks)) --steps 10 ${FLAGS:-}" # the same text, batches and steps for all

mkdir -p runs
if ! (set -C && echo $$ >runs/pid) 2>/dev/null; then # one run at a time writes to runs/
    other=$(cat runs/pid)
    ! kill -0 "$other" 2>/dev/null ||
        refuse "process $other writes to runs/: wait for its end (or delete runs/pid)"
    echo $$ >runs/pid
fi
trap 'rm -f runs/pid' EXIT
for lesson in $LESSONS; do
    for name in "${lesson#more/}"{,-alone,-split}; do rm -f "runs/$name".{json,pt,log}; done
done
rm -rf runs/begun

run() { # NAME COMMAND ...; what it prints goes to runs/NAME.log
    echo "${*:2}" >"runs/$1.log"
    set -- "$@" --json "runs/$1.json" --save "runs/$1.pt"
    finish ${LIMIT:+$python bench/limit.py $LIMIT} "${@:2}" >>"runs/$1.log" 2>&1 && return
    echo "exit code $?" >>"runs/$1.log"
    rm -f "runs/$1.json" "runs/$1.pt" # a command that failed has no result
}

finish() { # COMMAND ...: so that it ends if run.sh is ended
    "$@" &
    child=$!
    wait $child
}

run_plain() { # NAME COMMAND ...: what a lesson is compared with, and the same with one sequence at a time
    local batch
    run "$@"
    batch=$(sed -n 's/.* | batch \([0-9]*\) = .*/\1/p' "runs/$1.log")
    case "$*" in *fp64* | *-alone*single.py*) return ;; esac # fp64 rounds too little, single.py did it before
    run "${1%-alone}-split" "${@:2}" --accum "$batch"
}

run_lesson() { # NAME, by what its tests say of it: docstring of tools/lessons.py
    local path plain before command
    path=$(path_of "$1")
    plain=$(special "$1" PLAIN)
    before=$(special "$1" BEFORE)
    command=$(special "$1" RUN)
    command=" ${command:-torchrun LESSON} "
    if [ -n "$plain" ]; then # not single.py's run
        set -- "$1" "$(path_of "${plain%% *}")" ${plain#"${plain%% *}"}
        run_plain "$1-alone" $python tools/ledger.py "${@:2}" $flags
    fi
    [ -z "$before" ] || finish $python $path $flags ${before#*LESSON} >"runs/$1-before.log" 2>&1 || true
    command=${command/ python / $python }
    command=${command/ torchrun / $torchrun }
    command=${command/ N / $ranks }
    run "$1" ${command/ LESSON / tools/ledger.py $path } $flags
}

run_all() { # and print the name of each as it ends
    trap 'kill $child 2>/dev/null || true; wait; exit 1' HUP INT TERM
    run_plain single $python tools/ledger.py single.py $flags
    echo single
    [ -f runs/single.pt ] || return
    for lesson; do
        if [ "$lesson" != single ]; then run_lesson "$lesson" && echo "$lesson"; fi
    done
}

run_all "${@%.py}" | "$python" tools/compare.py runs - &
end='trap "" HUP INT TERM; kill $(jobs -p) $! 2>/dev/null || true; wait; exit 143' # torchruns, too
trap "$end" HUP INT TERM
wait $!
