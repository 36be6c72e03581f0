#!/usr/bin/env bash
# A training on four thread ranks beside plain libtorch, and three telling layouts. Usage: demo.sh path/to/dtensor
set -euo pipefail
tool=$1
color=auto
[ -t 1 ] || color=never

show() {
  local title=$1
  shift
  printf '\n== %s\n$ dtensor show' "$title"
  for word in "$@"; do
    [[ $word == *[\(\)]* ]] && printf ' "%s"' "$word" || printf ' %s' "$word"
  done
  printf '\n\n'
  "$tool" show --color "$color" "$@"
}

show 'Uneven: 7 rows on 2, 5 columns on 3; the last column belongs to rank 2 and 5 alone' \
  --mesh dp=2,tp=3 --tensor 7x5 --placements 'S(0),S(1)'
show 'Nested: both mesh dims cut the rows, and the last rank of 4x2 gets nothing of 13' \
  --mesh dp=4,tp=2 --tensor 13x4 --placements 'S(0),S(0)'
show 'Strided: tensor parallel cut the 10 rows first, then FSDP cut each half' \
  --mesh fsdp=2,tp=2 --tensor 10x4 --placements 'S(0,2),S(0)'

mkdir -p build
train=(--mesh dp=2,tp=2 --data README.md docs/layouts.md docs/plans.md docs/tensors.md --steps 100 --batch 16 --context 64
  --width 96 --heads 4 --layers 2 --compare --csv build/demo-loss.csv --svg build/demo-loss.svg)
printf '\n== A transformer that knows nothing of meshes, on 2x2 threads: data parallel by tensor parallel\n$ dtensor train'
printf ' %s' "${train[@]}"
printf '\n\n'
"$tool" train "${train[@]}"

"$tool" show --mesh fsdp=2,tp=2 --tensor 10x4 --placements 'S(0,2),S(0)' --svg build/demo.svg >/dev/null
printf '\nThe losses are drawn in build/demo-loss.svg, the last layout in build/demo.svg. Next: `%s train --help`, or `make test`.\n' "$tool"
