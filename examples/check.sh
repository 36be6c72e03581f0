#!/usr/bin/env bash
# check.sh PROGRAM SOURCE README: the README shows this source, word for word, and what the program prints.
set -euo pipefail
program=$1 source=$2 readme=$3
output=$("$program")
contains() { [[ $(<"$readme") == *"$1"* ]]; }
contains "$(<"$source")" || { echo "the README does not show $source as it is"; exit 1; }
contains "$output" || { echo "the README does not show what it prints:"; echo "$output"; exit 1; }
