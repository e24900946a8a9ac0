#!/usr/bin/env bash
# Trains under Slurm: a stage on each node, the driver on the first. From a folder that all nodes
# share, with rpcmp in PATH:
#
#     sbatch --nodes=3 --time=4:00:00 slurm.sh config.toml [OPTION OF RPCMP DRIVE]...
#
# The config has as many stages as there are nodes, and a [checkpoint] with shared = true, since the
# next time it may be other nodes. When time is up or the job is preempted, the running step ends
# and is saved, the job is requeued, and goes on from there. So it does after exit code 75, up to
# RPCMP_MAX_REQUEUES times. A driver that is killed is started again at once.
#
# The job's code is confined: what it reads besides its own files, such as a dataset, belongs into
# the config's [data] paths, and its folder, RPCMP_DATA, is granted by the servers.
#
#SBATCH --job-name=rpcmp
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@90
set -euo pipefail

config=${1:?which config? sbatch slurm.sh CONFIG [OPTION]...}
shift
job=${SLURM_JOB_ID:?this is for sbatch}
hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
mapfile -t nodes <<< "$hosts"
max_requeues=${RPCMP_MAX_REQUEUES:-20}
stages=()
echoes=()
driver=

# Of this one run, on all nodes, readable by its owner alone: certificates and the servers' output.
folder=$(mktemp --directory "$PWD/.rpcmp-$job-XXXXXX")

clean_up() {
    trap '' TERM
    if ((${#stages[@]})); then
        kill -TERM "${stages[@]}" 2> /dev/null || true
        wait "${stages[@]}" || true
        wait "${echoes[@]}" || true # or they make files in the folder that is being removed
    fi
    rm -rf "$folder"
}
trap clean_up EXIT

# Ends the driver, which finishes its step and saves, and the job, unless it is to go on.
finish() {
    trap '' TERM
    local status=75
    if [[ -n $driver ]]; then
        kill -TERM "$driver" 2> /dev/null || true
        status=0
        wait "$driver" || status=$?
    fi
    clean_up
    trap - EXIT
    if ((status == 75 || status == 143)) && ((${SLURM_RESTART_COUNT:-0} < max_requeues)); then
        case $(scontrol show job --oneliner "$job" || true) in
            *JobState=CANCELLED*) ;; # by a person, who wants no more of it
            *) scontrol requeue "$job" ;;
        esac
    fi
    exit "$status"
}
trap finish TERM

rpcmp certs init "$folder/certs" "${nodes[@]/#/--host=}"

# On free ports, so that two jobs may share a node; each server prints its port.
for stage in "${!nodes[@]}"; do
    said=$folder/stage$stage
    mkfifo "$said.pipe"
    # Both ends are open before anything is started: to open one alone waits for the other, which
    # may end first.
    exec {both}<> "$said.pipe"
    exec {reader}< "$said.pipe"
    exec {writer}> "$said.pipe"
    exec {both}>&-
    tee "$said" <&"$reader" {reader}<&- {writer}>&- &
    echoes+=("$!")
    srun --nodes=1 --ntasks=1 --nodelist="${nodes[stage]}" \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        rpcmp serve --stage "$stage" --listen 0.0.0.0:0 --certs "$folder/certs/stage$stage" \
        --checkpoints "${RPCMP_CHECKPOINTS:-$PWD}" \
        ${RPCMP_DATA:+--data "$RPCMP_DATA"} \
        >&"$writer" 2>&1 {reader}<&- {writer}>&- &
    stages+=("$!")
    exec {reader}<&- {writer}>&-
done

addresses=()
for stage in "${!nodes[@]}"; do
    said=$folder/stage$stage
    until port=$(sed -n 's/.* is SERVING on .*://p' "$said" 2> /dev/null) && [[ -n $port ]]; do
        if ! kill -0 "${stages[stage]}" 2> /dev/null; then
            status=0
            wait "${stages[stage]}" || status=$?
            echo "stage $stage has not started on ${nodes[stage]} (exit code $status)" >&2
            case $status in
                2 | 126 | 127) exit "$status" ;; # a bad option, no such program: nor will it ever
                *) finish ;;
            esac
        fi
        sleep 0.2
    done
    addresses+=("${nodes[stage]}:$port")
done

connect=$(IFS=, && echo "${addresses[*]}")
drive() {
    rpcmp drive "$config" --connect "$connect" --certs "$folder/certs/driver" --resume "$@" &
    driver=$!
}
drive "$@"

# Until the driver ends; or a TERM comes: to this script when time is up, to the servers when the
# job is preempted, which then end first. A driver that was killed, as for its memory, is started
# again, and goes on from what the servers hold.
restarts=0
while true; do
    status=0
    wait -n "$driver" "${stages[@]}" || status=$?
    if kill -0 "$driver" 2> /dev/null || ((status <= 128 || status == 143 || restarts == 5)); then
        finish
    fi
    restarts=$((restarts + 1))
    echo "the driver was ended by signal $((status - 128)); it is started again" >&2
    drive "$@"
done
