#!/usr/bin/env bash
# Format, the arrows between folders, and a few habits. Prints every complaint; fails if there is any.
set -uo pipefail
cd "$(dirname "$0")/.."
bad=0
complain() { echo "lint: $*"; bad=1; }

mapfile -t sources < <(git ls-files --cached --others --exclude-standard '*.h' '*.cpp' | while read -r f; do [ -f "$f" ] && echo "$f"; done)
if ! clang-format --dry-run --Werror "${sources[@]}" 2>/tmp/lint.$$; then
  grep 'error:' /tmp/lint.$$ | cut -d: -f1 | sort | uniq -c | sed 's/^/lint: clang-format, lines to change: /'
  bad=1
fi
rm -f /tmp/lint.$$

# Who may include whom: core <- comm <- runtime <- {parallel, checkpoint, debug, testing}; nothing includes dtensor.h.
# debug/ draws specs and needs nothing of torch so far, so it is held to core.
allow() {  # allow FOLDER "the folders it may include"
  local folder=$1 allowed=$2 line included
  while IFS= read -r line; do
    included=$(sed -E 's|.*#include "dtensor/([a-z]+)/.*|\1|' <<<"$line")
    [[ " $folder $allowed " == *" $included "* ]] || complain "arrow: $line"
  done < <(grep -nE '#include "dtensor/[a-z]+/' "dtensor/$folder" -r --include='*.h' --include='*.cpp' 2>/dev/null)
}
allow core ""
allow comm "core"
allow runtime "core comm"
allow debug "core"
allow parallel "core comm runtime"
allow checkpoint "core comm runtime"
allow testing "core comm runtime"
for f in $(grep -rlE '#include [<"]dtensor/dtensor\.h' dtensor 2>/dev/null); do complain "arrow: $f includes the users' umbrella"; done
for f in $(grep -rlE '#include <(torch|ATen|c10)/' dtensor/core dtensor/debug 2>/dev/null); do complain "arrow: $f includes torch"; done
for f in $(grep -rlE '#include <(torch/torch\.h|ATen/ATen\.h|torch/library\.h|ATen/core/dispatch/Dispatcher\.h|torch/csrc/distributed/c10d/ProcessGroup.*)>' dtensor --include='*.h' --exclude='*_impl.h' 2>/dev/null); do
  complain "$f: an installed header of ours includes a whole tree of torch"
done

for f in "${sources[@]}"; do
  case $f in
    *.h) grep -q '#pragma once' "$f" || complain "$f: no #pragma once"; limit=300 ;;
    *) limit=800 ;;
  esac
  lines=$(wc -l <"$f")
  [ "$lines" -le "$limit" ] || grep -q 'lint: long because' "$f" || complain "$f: $lines lines, more than $limit"
  case $f in */utils.*|*_utils.*|*/util.*) complain "$f: what is it about?" ;; esac
done
diff -q <(bash cmake/api_reference.sh) docs/api.md >/dev/null || complain "docs/api.md is not what the headers say; try: make api"
grep -nE '\b(TODO|FIXME|XXX)\b' "${sources[@]}" && complain "unfinished business in the code"
[ $bad = 0 ] && echo "lint: ${#sources[@]} files are fine"
exit $bad
