#!/usr/bin/env bash
# Installs Esper into a virtual environment: scripts/set_up.sh VENV EXTRAS
#
# On Linux, PyTorch on PyPI brings the libraries of CUDA, about 5 GB. Without an NVIDIA driver they are
# of no use: the build for CPUs comes from TORCH_INDEX, which is asked for torch alone. Empty, or where
# it cannot be reached, the package index decides.
set -euo pipefail
venv=$1 extras=$2
# Python compiles what it imports; compiling everything takes a fifth of the space and much of the time.
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt)
torch=$(sed -n 's/^torch==//p' constraints.txt)

for_cpus=
if [ "$(uname -s)" != Linux ]; then
  size="about 1.4 GB"
elif [ -n "$TORCH_INDEX" ] && ! command -v nvidia-smi > /dev/null; then
  for_cpus=yes
  size="about 1.4 GB, with PyTorch for CPUs"
else
  size="about 6 GB if PyTorch comes with the libraries of CUDA"
fi
echo "Esper and the packages it needs go to $venv: $size. This takes minutes."
"$PYTHON" -m venv "$venv"
if [ -n "$for_cpus" ] &&
  ! "${install[@]}" --no-deps --retries 1 --timeout 30 --index-url "$TORCH_INDEX" "torch==$torch+cpu"; then
  echo "PyTorch for CPUs cannot be fetched from $TORCH_INDEX, so the package index decides:" \
    "with the libraries of CUDA it takes about 6 GB."
fi
"${install[@]}" -e ".[$extras]"
echo "$venv was set up in $SECONDS s; it takes $(du -sh "$venv" | cut -f1)."
