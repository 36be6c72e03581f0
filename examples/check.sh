#!/usr/bin/env bash
# check.sh PROGRAM SOURCE PAGE: the page shows this source, word for word, and what the program prints.
set -euo pipefail
program=$1 source=$2 page=$3
output=$("$program")
contains() { [[ $(<"$page") == *"$1"* ]]; }
contains "$(<"$source")" || { echo "$page does not show $source as it is"; exit 1; }
contains "$output" || { echo "$page does not show what it prints:"; echo "$output"; exit 1; }
