#!/usr/bin/env bash
# job.sbatch on a cluster of two nodes that are network namespaces of this machine, under a real SLURM: slurmctld and
# two slurmd. zero3.py runs to its end; under resume.py one node is killed, and the job is requeued and goes on.
# Linux and root only; needs slurm-wlm (Debian, Ubuntu) and iproute2.
#
#   bench/slurm.sh                  (PYTHON=python that has torch; about two minutes)
set -euo pipefail
cd "$(dirname "$0")/.."

for command in slurmctld slurmd sbatch ip; do
    command -v $command >/dev/null || { echo "bench/slurm.sh: needs $command (apt install slurm-wlm iproute2)" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "bench/slurm.sh: needs root, for network namespaces" >&2; exit 2; }
python=$(command -v "${PYTHON:-python3}")
folder=$(mktemp -d)
name=rzs$$
export SLURM_CONF=$folder/slurm.conf PATH=$(dirname "$python"):$PATH
export NPROC=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0

clean_up() {
    trap - EXIT INT TERM
    scancel --quiet --user=root 2>/dev/null || true
    for node in 0 1; do
        ip netns pids "$name-$node" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del "$name-$node" 2>/dev/null || true
    done
    [ ! -f "$folder/slurmctld.pid" ] || kill "$(cat "$folder/slurmctld.pid")" 2>/dev/null || true
    ip link del "$name" 2>/dev/null || true
    rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

cat >"$SLURM_CONF" <<END
ClusterName=rankzero
SlurmctldHost=$(hostname -s)(10.78.0.254)
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=2
NodeName=node0 NodeHostname=$(hostname -s) NodeAddr=10.78.0.1 Port=7001
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=10.78.0.2 Port=7002
PartitionName=all Nodes=ALL Default=YES
END
printf '127.0.0.1 localhost\n10.78.0.1 node0\n10.78.0.2 node1\n10.78.0.254 %s\n' "$(hostname -s)" >"$folder/hosts"
mkdir "$folder/state" "$folder/node0" "$folder/node1"

start_node() { # its own network and /etc/hosts, all else is this machine's
    nsenter --net="/run/netns/$name-$1" unshare --mount \
        bash -c "mount --bind $folder/hosts /etc/hosts; exec slurmd -N node$1"
}

ip link add "$name" type bridge
ip addr add 10.78.0.254/24 dev "$name"
ip link set "$name" up
for node in 0 1; do
    ip netns add "$name-$node"
    ip link add "$name.$node" type veth peer name eth0 netns "$name-$node"
    ip link set "$name.$node" master "$name" up
    ip -n "$name-$node" addr add "10.78.0.$((node + 1))/24" dev eth0
    ip -n "$name-$node" link set lo up
    ip -n "$name-$node" link set eth0 up
done
slurmctld
for node in 0 1; do start_node $node; done
for _ in $(seq 60); do [ "$(sinfo --noheader --format %T | sort -u)" = idle ] && break || sleep 1; done
sinfo

submit() { sbatch --parsable --output="$folder/%j.log" --chdir="$PWD" job.sbatch "$@"; }

state_of() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p'; }

wait_for() { # JOB: until it has ended
    for _ in $(seq 300); do
        case $(state_of "$1") in COMPLETED | FAILED | CANCELLED | NODE_FAIL) break ;; esac
        sleep 1
    done
    grep -v '^$' "$folder/$1.log" | sed 's/\[default0\]://'
    echo "job $1: $(state_of "$1")"
}

flags="--batch 8 --steps 6 --data LICENSE"
echo "== zero3.py"
wait_for "$(submit zero3.py $flags)"
echo "== resume.py, whose second node is killed"
job=$(submit resume.py $flags --steps 400 --every 20 --checkpoint "$folder/c")
for _ in $(seq 120); do grep -q 'step 100/' "$folder/$job.log" 2>/dev/null && break || sleep 0.2; done
ip netns pids "$name-1" | xargs kill -9
echo "killed all of node1"
for _ in $(seq 60); do sinfo --noheader --Node --format "%N %T" | grep -q 'node1 down' && break || sleep 1; done
start_node 1
wait_for "$job" | grep -E 'job|step +(1|[0-9]*[02468]0)/|Error|resume \|' | cut -c1-110
"$python" single.py $flags --steps 400 | grep 'step 400' | cut -c1-110
