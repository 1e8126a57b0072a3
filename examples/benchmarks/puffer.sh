#!/usr/bin/env bash
# Builds PufferLib 3.0.0 for the suite control, in an environment of its own under PEERS_HOME: two minutes, 1 GB.
# Its games are left out (NO_OCEAN), and so is CUDA (no nvcc on the path). Its setup.py then misses a variable, which it
# finds here among Python's built-in names.
set -euo pipefail
home=${PEERS_HOME:-$HOME/.cache/peers}
mkdir -p "$home"
echo "torch==2.13.0" >"$home/constraints.txt"
[ -x "$home/puffer/bin/python" ] || python3 -m venv "$home/puffer"
pip() { "$home/puffer/bin/pip" --disable-pip-version-check "$@"; }
pip install -q torch==2.13.0
pip install -q -c "$home/constraints.txt" setuptools wheel Cython pybind11 "numpy<2" "gym<=0.23" \
  "gymnasium[classic-control]<=0.29.1" "pettingzoo<=1.24.1" "shimmy[gym-v21]<2" psutil pynvml rich rich_argparse imageio \
  pyro-ppl "heavyball<2"
added=$(mktemp -d)
echo "import builtins; builtins.c_extension_paths = []" >"$added/sitecustomize.py"
path=
while read -r -d : folder; do
  [ -x "$folder/nvcc" ] || path+=$folder:
done <<<"$PATH:"
PATH=${path%:} PYTHONPATH=$added NO_OCEAN=1 pip install -q --no-build-isolation --no-deps pufferlib==3.0.0
rm -r "$added"
