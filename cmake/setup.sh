#!/usr/bin/env bash
# Installs what is missing (as root, by apt) or says what is. Usage: setup.sh PART…   parts: core comm lint fuzz bench python
set -euo pipefail

have_command() { command -v "$1" >/dev/null 2>&1; }
have_header() { echo "#include <$1>" | "${CXX:-g++}" -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1; }

missing=()
need() {  # need PACKAGE CHECK ARGUMENT…
  local package=$1
  shift
  "$@" || missing+=("$package")
}
collect() {
  missing=()
  for part in "$@"; do
    case $part in
      core)
        need g++ have_command "${CXX:-g++}"
        need cmake have_command cmake
        need ninja-build have_command ninja
        need libgtest-dev have_header gtest/gtest.h
        need libcli11-dev have_header CLI/CLI.hpp
        need nlohmann-json3-dev have_header nlohmann/json.hpp
        ;;
      lint) need clang-format have_command clang-format ;;
      fuzz)
        need clang have_command clang++
        need libclang-rt-14-dev fuzzer_links
        ;;
      bench) need libbenchmark-dev have_header benchmark/benchmark.h ;;
      comm)  # Open MPI as a backend, and network namespaces for the test of two hosts
        need libopenmpi-dev have_command mpicxx
        need openmpi-bin have_command mpirun
        need iproute2 have_command ip
        ;;
      python)  # libtorch from PyPI, and the headers that its Python package is built with
        need python3-venv python_has_venv
        need python3-dev python_has_headers
        ;;
      *) echo "setup.sh: unknown part '$part'" >&2; exit 2 ;;
    esac
  done
}
fuzzer_links() {
  have_command clang++ || return 1
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ -x c++ -fsanitize=fuzzer,address - -o /dev/null >/dev/null 2>&1
}
python_has_headers() { python3 -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' >/dev/null 2>&1; }
python_has_venv() { python3 -c 'import venv, ensurepip' >/dev/null 2>&1; }

collect "$@"
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! have_command apt-get; then
  echo "missing: ${missing[*]}" >&2
  echo "try, as root: apt-get install -y ${missing[*]}" >&2
  exit 1
fi
# ccache is not needed; it makes the second build fast.
have_command ccache || missing+=(ccache)
echo "-- installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
collect "$@"
[ ${#missing[@]} -eq 0 ] || { echo "installed, and still missing: ${missing[*]}" >&2; exit 1; }
