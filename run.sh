#!/usr/bin/env bash
# ./run.sh                 run every lesson on real text and compare each with single.py; more in runs/
# ./run.sh ddp ...         only these
# ./run.sh setup           only make .venv with torch and numpy, if the Python on PATH lacks them
# ./run.sh test [LESSON]   the tests, or those of a lesson, or of learn.py: learn (the rest goes to pytest)
# ./run.sh fuzz [SEED] [N] N runs with random flags, good and odd; deaths and answers that the tests sample
# ./run.sh lint            ruff, and each lesson and folder beside its number of lines
# ./run.sh site            the lessons as pages, with films, in docs/site
# ./run.sh figures [PAGE]  the commands of docs/results again, with what they print (root, Linux; 45 minutes)
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
[ -f tools/run.py ] || refuse "$PWD is no checkout of rankzero; call run.sh by its own path, no link"

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
    *) set -- --lesson "${1%.py}" "${@:2}" ;;
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
figures)
    shift
    set_up requirements-dev.txt "torch numpy"
    exec "$python" bench/figures.py "$@"
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

set_up requirements.txt "torch numpy"
exec "$python" tools/run.py "$@"
