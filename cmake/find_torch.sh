#!/usr/bin/env bash
# Finds libtorch, or installs one, and prints one line: CMAKE_PREFIX VERSION SOURCE.
#   TORCH=2.13.0      that version, from PyPI, in a virtual environment under .venv/;  TORCH=debian: Debian's
#   otherwise, in this order:
#   TORCH_DIR, CMAKE_PREFIX_PATH   a libtorch of the user's
#   python3's torch, if it is installed
#   Debian's libtorch-dev, by apt
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# The folder with TorchConfig.cmake below a prefix, if there is one.
config_below() {
  local sub
  for sub in "" share/cmake/Torch lib/cmake/Torch Torch "lib/$(uname -m)-linux-gnu/cmake/Torch"; do
    [ -f "$1/$sub/TorchConfig.cmake" ] && { (cd "$1/$sub" && pwd); return 0; }
  done
  return 1
}
report() {  # report CONFIG_DIR SOURCE
  local version
  version=$(sed -n 's/^set(PACKAGE_VERSION "\(.*\)").*/\1/p' "$1/TorchConfigVersion.cmake" | head -n 1)
  # Debian's 1.13.1 calls itself 1.13.0 in its own files.
  [ "$2" = Debian ] && version=$(dpkg-query -W -f '${Version}' libtorch-dev | sed 's/[+-].*//')
  echo "$1 ${version:-unknown} $2"
  exit 0
}
python_torch() {  # the torch folder of a python, without importing it
  "$1" -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")' 2>/dev/null
}

if [ -n "${TORCH:-}" ] && [ "$TORCH" != debian ]; then
  [[ $TORCH =~ ^[0-9]+\.[0-9]+\.[0-9]+([+.a-z0-9]*)$ ]] || { echo "TORCH='$TORCH' is neither a version such as 2.13.0 nor debian" >&2; exit 2; }
  venv=$here/../.venv/torch-$TORCH
  if [ ! -f "$venv/ready" ]; then
    bash "$here/setup.sh" python >&2
    echo "-- installing torch $TORCH from PyPI into .venv/torch-$TORCH" >&2
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$TORCH" numpy >&2
    touch "$venv/ready"
  fi
  # What torch.testing's operator database imports, and what checkpoints are compared with.
  for package in expecttest safetensors; do
    "$venv/bin/python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$package'))" ||
      "$venv/bin/pip" install --quiet --disable-pip-version-check "$package" >&2
  done
  dir=$(config_below "$(python_torch "$venv/bin/python")") || { echo "torch $TORCH has no CMake files" >&2; exit 1; }
  report "$dir" "PyPI"
fi
if [ -z "${TORCH:-}" ]; then
  if [ -n "${TORCH_DIR:-}" ]; then
    dir=$(config_below "$TORCH_DIR") || { echo "TORCH_DIR='$TORCH_DIR' holds no TorchConfig.cmake" >&2; exit 1; }
    report "$dir" "TORCH_DIR"
  fi
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in ${prefixes[@]+"${prefixes[@]}"}; do
    dir=$(config_below "${prefix%;}") && report "$dir" "CMAKE_PREFIX_PATH"
  done
  if command -v python3 >/dev/null; then
    found=$(python_torch python3) && [ -n "$found" ] && dir=$(config_below "$found") && report "$dir" "python3"
  fi
fi
dir=$(config_below /usr) && report "$dir" "Debian"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "missing: libtorch-dev; try, as root: apt-get install -y libtorch-dev, or set TORCH_DIR to a libtorch" >&2
  exit 1
fi
echo "-- installing libtorch-dev" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends libtorch-dev >/dev/null
dir=$(config_below /usr) && report "$dir" "Debian"
echo "libtorch-dev was installed, but its TorchConfig.cmake was not found" >&2
exit 1
