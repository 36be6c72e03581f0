#!/usr/bin/env bash
# Prints docs/api.md: what the umbrella header gives its users, with the comments that say what it means.
set -euo pipefail
cd "$(dirname "$0")/.."
cat <<'END'
# API reference

Printed from the headers by `cmake/api_reference.sh`; `#include <dtensor/dtensor.h>` has all of it, namespace `dtensor`.
END
sed -n 's/^#include "\(.*\)"$/\1/p' dtensor/dtensor.h | while read -r header; do
  printf '\n## %s\n\n```cpp\n' "$header"
  awk '
    /^#/ || /^namespace / || /^}  \/\/ namespace/ { next }
    /^ private:/ { hidden = 1; next }
    hidden && /^};/ { hidden = 0 }
    hidden || /^  friend (class|struct|DeviceMesh|CommunicatorPtr)/ { next }
    /^class [A-Za-z]+;$/ || /^struct [A-Za-z]+;$/ { next }
    NF == 0 { gap = started; next }
    { if (gap) print ""; gap = 0; started = 1; print }
  ' "$header"
  printf '```\n'
done
