#!/bin/sh
# format.sh - every C file as clang-format 14 lays it out.
set -eu
cd "$(dirname "$0")/../.."
command -v clang-format-14 >/dev/null || { echo "  skipped: clang-format 14 is not installed"; exit 77; }
find proto kernels cluster pipeline node coordinator tests -name '*.[ch]' -print0 |
    xargs -0 clang-format-14 --dry-run --Werror
