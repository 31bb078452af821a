#!/usr/bin/env bash
# Several "hosts" on one machine: network namespaces on a bridge, links of a rate. Linux and root only.
#
#   bench/hosts.sh HOSTS RATE [--ranks-per-host K] -- ddp.py --size small ...
#   bench/hosts.sh 2 1gbit -- ddp.py --size small
#   bench/hosts.sh HOSTS RATE --within COMMAND [ARGUMENT ...]
#
# Runs torchrun with --nnodes=HOSTS, one agent in each namespace; or a command that puts its ranks there by
# itself, into $NETNS-0 and so on, as tools/run.py does. Exits with a host's status if one fails, and takes
# everything down however it ends.
set -euo pipefail

usage="usage: bench/hosts.sh HOSTS RATE [--ranks-per-host K] -- SCRIPT [ARGUMENT ...] (or --within COMMAND)"
[ $# -ge 4 ] || { echo "$usage" >&2; exit 2; }
hosts=$1 rate=$2 per_host=1
shift 2
if [ "$1" = --ranks-per-host ]; then per_host=$2; shift 2; fi
within=${1-}
[ "$within" = -- ] || [ "$within" = --within ] || { echo "$usage" >&2; exit 2; }
shift
[[ $hosts =~ ^[1-9][0-9]?$ && $per_host =~ ^[1-9][0-9]*$ ]] || { echo "$usage (HOSTS: 1 to 99)" >&2; exit 2; }
[[ $rate =~ ^[0-9]*[1-9][0-9]*[kmg]?bit$ ]] || { echo "$usage (RATE: 1gbit, 100mbit ...)" >&2; exit 2; }
if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ] || ! { command -v ip && command -v tc; } >/dev/null; then
    echo "bench/hosts.sh: needs Linux, root and iproute2 (ip, tc)" >&2
    exit 2
fi

name=rz$$ # of the bridge and the namespaces: 15 characters at most
python=${PYTHON:-$(ls .venv/bin/python 2>/dev/null || echo python3)} # one that has torch
children=()

clean_up() {
    trap '' HUP INT TERM # a second signal ends the hosts, too, but not this
    trap - EXIT
    [ ${#children[@]} = 0 ] || kill "${children[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    for ((host = 0; host < hosts; host++)); do
        ip netns pids "$name-$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del "$name-$host" 2>/dev/null || true
    done
    ip link del "$name" 2>/dev/null || true
}
trap clean_up EXIT
trap 'trap "" HUP INT TERM; exit 130' HUP INT TERM

ip link add "$name" type bridge
ip link set "$name" up
for ((host = 0; host < hosts; host++)); do
    ip netns add "$name-$host"
    ip link add "$name.$host" type veth peer name eth0 netns "$name-$host"
    ip link set "$name.$host" master "$name" up
    ip -n "$name-$host" addr add "10.77.0.$((host + 1))/24" dev eth0
    ip -n "$name-$host" link set lo up
    ip -n "$name-$host" link set eth0 up
    # what a host sends, and what it receives, each at the rate of a full-duplex link
    ip netns exec "$name-$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 50ms
    tc qdisc add dev "$name.$host" root tbf rate "$rate" burst 256kb latency 50ms
done
if [ "$within" = --within ]; then
    NETNS=$name "$@" &
    children+=($!)
fi
for ((host = 0; host < hosts; host++)); do
    [ "$within" = -- ] || break
    ip netns exec "$name-$host" env GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
        "$python" -m torch.distributed.run --nnodes="$hosts" --node_rank="$host" \
        --nproc_per_node="$per_host" --master_addr=10.77.0.1 --master_port=29500 "$@" &
    children+=($!)
done
status=0
for child in "${children[@]}"; do
    wait "$child" || status=$?
done
exit "$status"
