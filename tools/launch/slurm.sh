#!/bin/bash
# One run over all nodes of a Slurm job. From the clone, on a file system that the nodes share:
#
#     sbatch --nodes=2 --gpus-per-node=8 tools/launch/slurm.sh main_rl.py --config my.yaml run_dir=/shared/runs device=cuda
#
# Every node starts Ray; the first one runs the program, and Ray ends when that ends. docs/how_to/nodes.md explains it.
# HEAD_ADDRESS=10.0.0.1 names the address to meet at, where the first one of the first node is on the wrong network.
#SBATCH --job-name=feynrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export PATH="$PWD/.venv/bin:$PATH"

# An address, not a name: on many systems a node's own name leads to its loopback address.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # it reads all, and breaks no pipe
address=${HEAD_ADDRESS:-$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname -I | cut -d ' ' -f 1)}
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node do not meet

# Whoever reaches Ray runs code: it takes calls only with this token, which srun hands to every node.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 # seconds; a cold file system is slow to start Python from

# RAY_OPTIONS: further options of `ray start`, such as --num-gpus=4
# shellcheck disable=SC2086
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    ray symmetric-run --address "$address:$port" --min-nodes "$SLURM_JOB_NUM_NODES" ${RAY_OPTIONS:-} \
    -- python "$@" ray_address="$address:$port"
