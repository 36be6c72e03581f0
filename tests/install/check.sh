#!/usr/bin/env bash
# check.sh CMAKE BUILD_DIR PROJECT
set -euo pipefail
cmake=$1 build=$2 project=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
# What was not installed cannot be used by accident.
[ ! -e "$work/prefix/include/dtensor/core/spec_impl.h" ]
"$cmake" -S "$project" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
"$cmake" --build "$work/build" >/dev/null
output=$("$work/build/outside")
echo "$output"
[ "$output" = "f32[7,5] @ 2x3(dp,tp) : S(0),S(1): rank 5 holds [3,1]" ]
"$work/prefix/bin/dtensor" show --spec "f32[4] @ 2(a) : S(0)" >/dev/null
